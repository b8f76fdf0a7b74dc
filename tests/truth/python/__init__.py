"""Compares Python stacks from the BPF program with the programs' own logs of their execution."""
