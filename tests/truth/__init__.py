"""Stacks of the BPF program, compared with another unwinder on the same registers and memory."""
