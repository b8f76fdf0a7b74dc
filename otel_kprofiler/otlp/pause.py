"""Allows other threads to run between samples during encoding."""


def go_on() -> None:
    """Do nothing. CPython can switch threads at the call, but not within C code."""
