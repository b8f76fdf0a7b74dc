"""How far a recording is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import click

from otel_kprofiler.reporting import Account

_LINE_EVERY_S: Final = 5.0


class Progress(Protocol):
    """Shows the state of a recording."""

    def update(self, elapsed_s: float, account: Account) -> None:
        """Show the present state; called a few times per second."""


class _Lines:
    """One plain line every few seconds."""

    def __init__(self) -> None:
        self._next_s = _LINE_EVERY_S

    def update(self, elapsed_s: float, account: Account) -> None:
        if elapsed_s >= self._next_s:
            self._next_s += _LINE_EVERY_S
            click.echo(f"{elapsed_s:.0f} s: {describe(account)}", err=True)


def describe(account: Account) -> str:
    """Sample and loss counters in a few words."""
    return f"{account.taken:,} samples, {sum(account.lost.values()):,} lost"


@contextmanager
def open_progress(duration_s: float) -> Iterator[Progress]:
    """Show progress on the standard error stream; ``duration_s`` is infinite if unknown."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console  # noqa: PLC0415 - only for terminals
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as RichProgress  # noqa: PLC0415

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        total = duration_s if duration_s != float("inf") else None
        task = bar.add_task("starting", total=total)

        class _Bar:
            def update(self, elapsed_s: float, account: Account) -> None:
                bar.update(task, completed=elapsed_s, description=describe(account))

        yield _Bar()
