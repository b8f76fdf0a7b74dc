"""Services that log their spans as ground truth, with which their samples are compared."""
