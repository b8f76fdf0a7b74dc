"""Prints text safely to terminals."""

from typing import Final

import click

from otel_kprofiler.text import describe_count, escape_controls

__all__ = ["FILE_FIX", "describe_count", "say"]

FILE_FIX: Final = "pass an existing file that this user can read"


def say(text: str, *, err: bool = False) -> None:
    """Print lines with control characters escaped, because names and messages are untrusted."""
    click.echo("\n".join(map(escape_controls, text.split("\n"))), err=err)
