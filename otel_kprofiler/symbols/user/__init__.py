"""Symbols of user files: executables, libraries, and code made at run time."""
