"""Compares the BPF unwinder with a reference unwinder, given the same registers and memory."""
