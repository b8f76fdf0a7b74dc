"""Symbols of user files: executables, libraries, and code that is made at run time."""
