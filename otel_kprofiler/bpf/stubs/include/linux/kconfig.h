/* bcc accepts a directory as kernel headers if it contains this file. */
#define CONFIG_BPF_SYSCALL 1
