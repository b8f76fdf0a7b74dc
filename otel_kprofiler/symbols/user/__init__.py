"""Symbols for user code: executables, libraries, and runtime-generated code."""
