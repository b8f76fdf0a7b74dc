"""Services that note their own truth about spans, and samples that are compared with it."""
