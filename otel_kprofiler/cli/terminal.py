"""What commands say to people."""

from __future__ import annotations

import click

from otel_kprofiler.text import escape_controls


def say(text: str, *, err: bool = False) -> None:
    """Print lines without what a terminal would obey: names and messages are of others."""
    click.echo("\n".join(map(escape_controls, text.split("\n"))), err=err)
