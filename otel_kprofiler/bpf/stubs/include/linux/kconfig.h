/* The bcc compiler takes a directory with this file for the headers of a kernel. */
#define CONFIG_BPF_SYSCALL 1
