"""Python stacks of the BPF program, compared with programs that log what runs at each instant."""
