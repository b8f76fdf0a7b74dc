"""Safe output to terminals."""

from __future__ import annotations

import click

from otel_kprofiler.text import escape_controls


def say(text: str, *, err: bool = False) -> None:
    """Print lines with control characters escaped, since names and messages are untrusted."""
    click.echo("\n".join(map(escape_controls, text.split("\n"))), err=err)
