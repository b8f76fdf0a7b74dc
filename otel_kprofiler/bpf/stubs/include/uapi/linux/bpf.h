#include <bcc/bpf.h> /* part of bcc */
