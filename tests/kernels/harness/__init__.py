"""Boots real kernels under qemu and runs the tests marked ``kernel`` inside; see ``run.py``."""
