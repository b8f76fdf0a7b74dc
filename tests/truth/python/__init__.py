"""Python stacks from the BPF program, compared with logs of what programs run."""
