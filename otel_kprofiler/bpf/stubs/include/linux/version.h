/* The oldest kernel that we serve; bcc leaves out what is newer. */
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
