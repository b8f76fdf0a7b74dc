"""Finds and reads the symbols of the kernel, its modules and BPF programs."""
