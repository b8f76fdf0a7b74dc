"""ELF files of the kernel: relative address to function, as a backend does it."""
