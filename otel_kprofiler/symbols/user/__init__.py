"""Symbols of user code: executables, libraries, and runtime-generated code."""
