"""Services that log their spans as ground truth for checking their samples."""
