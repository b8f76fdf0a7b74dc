"""Python functions and lines, from descriptions of the code objects of CPython processes."""
