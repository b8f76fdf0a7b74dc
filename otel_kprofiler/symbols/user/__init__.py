"""Symbols of user files: executables, libraries, and runtime-generated code."""
