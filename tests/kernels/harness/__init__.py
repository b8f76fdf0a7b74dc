"""Boots real kernels under qemu and runs the tests marked ``kernel`` inside. See ``run.py``."""
