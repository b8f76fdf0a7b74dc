"""Safe output to terminals."""

from __future__ import annotations

import click

from otel_kprofiler.text import escape_controls


def say(text: str, *, err: bool = False) -> None:
    """Print lines with control characters escaped, since names and messages are untrusted."""
    click.echo("\n".join(map(escape_controls, text.split("\n"))), err=err)


def describe_count(count: int, noun: str, plural: str = "") -> str:
    """``1 sample``, ``2,000 samples``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
