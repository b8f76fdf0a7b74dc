"""Python stacks of the kernel program against programs that say at each instant what they run."""
