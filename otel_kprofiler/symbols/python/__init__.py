"""Resolves Python functions and lines from descriptions of CPython code objects."""
