"""Services that log their spans as ground truth, and samples that are compared with it."""
