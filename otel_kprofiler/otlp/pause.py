"""Lets other threads run between samples during encoding."""

from __future__ import annotations


def go_on() -> None:
    """Do nothing. CPython can switch threads at the call, but not within C code."""
