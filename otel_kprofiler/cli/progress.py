"""Shows the progress of a recording as a bar on a terminal, or as lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import click

from otel_kprofiler.cli.terminal import describe_count
from otel_kprofiler.model import Account

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

_LINE_EVERY_S: Final = 5.0
_STEPS_PER_S: Final = 100
"""Resolution of the progress bar, in steps per second."""


class Progress(Protocol):
    """Shows the progress of a recording."""

    def update(self, elapsed_s: float, account: Account) -> None:
        """Show the current progress. Call this method a few times per second."""


class _Lines:
    def __init__(self) -> None:
        self._next_s = _LINE_EVERY_S

    def update(self, elapsed_s: float, account: Account) -> None:
        if elapsed_s >= self._next_s:
            self._next_s += _LINE_EVERY_S
            click.echo(f"{elapsed_s:.0f} s: {describe(account)}", err=True)


class _Bar:
    def __init__(self, bar: ProgressBar[int]) -> None:
        self._bar = bar

    def update(self, elapsed_s: float, account: Account) -> None:
        self._bar.label = describe(account)
        self._bar.update(round(elapsed_s * _STEPS_PER_S) - self._bar.pos)


def describe(account: Account) -> str:
    """Format the counts of samples taken and lost."""
    return f"{describe_count(account.taken, 'sample')}, {sum(account.lost.values()):,} lost"


@contextmanager
def open_progress(duration_s: float) -> Iterator[Progress]:
    """Show a recording's progress on standard error; ``duration_s`` is infinite if unknown."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with _open_bar(duration_s) as bar:
        yield _Bar(bar)


def _open_bar(duration_s: float) -> ProgressBar[int]:
    """If the duration is unknown, only the label is shown."""
    has_end = duration_s != float("inf")
    return click.progressbar(
        length=round(duration_s * _STEPS_PER_S) if has_end else sys.maxsize,
        bar_template="%(bar)s  %(label)s" if has_end else "%(label)s",
        show_eta=False,
        file=sys.stderr,
    )
