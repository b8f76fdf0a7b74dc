"""Stacks of the kernel program against another implementation, on the same registers and memory."""
