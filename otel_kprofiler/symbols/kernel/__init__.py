"""Symbols of the kernel, its modules and BPF programs."""
