/* The oldest supported kernel; bcc omits everything newer. */
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
