"""Kernel ELF files: relative address to function, as a backend resolves it."""
