"""Compares the BPF program's stacks with another unwinder's, from the same registers and memory."""
