/* bcc takes a directory that contains this file for kernel headers. */
#define CONFIG_BPF_SYSCALL 1
