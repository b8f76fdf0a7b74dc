"""Loads profiles for commands from files and ClickHouse tables."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from os.path import basename
from typing import Any, Final, NamedTuple

from otel_kprofiler.analysis import Filter, Samples, load_samples, select_sides
from otel_kprofiler.cli.moments import Moment
from otel_kprofiler.cli.profiles import load_profiles
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.clickhouse import SCHEME, Need, ProfileStore, Range, Selection, parse_address
from otel_kprofiler.errors import KProfilerError

_DEFAULT_NS: Final = 3_600_000_000_000
"""Length of the default time range for a table, in nanoseconds."""


class Choice(NamedTuple):
    """A selection of samples, and of frame types such as ``kernel`` (empty: all)."""

    chosen: Filter
    start: Moment | None = None
    end: Moment | None = None
    sides: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Choice:
        """Creates a choice from the options of ``report``."""
        fields = dict(options)
        start, end, sides = (fields.pop(name) for name in ("start", "end", "sides"))
        return cls(Filter(**fields), start, end, sides)

    def apply(self, samples: Samples) -> Samples:
        """Returns the selected samples, with only the frames of the selected types."""
        return self.apply_sides(self.chosen.apply(self.cut(samples)))

    def cut(self, samples: Samples) -> Samples:
        """Returns the samples in the time range."""
        if not self.start and not self.end:
            return samples
        first, last = min(samples.times, default=0), max(samples.times, default=0)
        return samples.between(
            self.start.unix_ns(first, last + 1) if self.start else 0,
            self.end.unix_ns(first, last + 1) if self.end else sys.maxsize,
        )

    def apply_sides(self, samples: Samples) -> Samples:
        """Returns the samples with only the frames of the selected types, such as ``kernel``."""
        return select_sides(samples, self.sides) if self.sides else samples


def is_table(source: str) -> bool:
    """Returns whether a source is a table rather than a file."""
    return source.startswith(SCHEME)


def describe_source(source: str) -> str:
    """Returns a short display name of a source, without secrets."""
    return parse_address(source, os.environ).label if is_table(source) else basename(source)


def outside_error(samples: Samples, options: str) -> KProfilerError:
    """Returns the error for a time range, given by ``options``, that has none of the samples."""
    first, last = (
        datetime.fromtimestamp(time_ns / 1e9, tz=UTC)
        for time_ns in (min(samples.times), max(samples.times))
    )
    return KProfilerError(
        f"no sample is in the time range of {options}",
        hint=f"choose times from {first:%Y-%m-%dT%H:%M:%S} to {last:%Y-%m-%dT%H:%M:%S} (UTC), "
        f"or from 0s to {(last - first).total_seconds():.1f}s after the first sample",
    )


class Loaded(NamedTuple):
    """All samples in the time range, and the selected samples among them."""

    all: Samples
    chosen: Samples


def load_choice(
    sources: Sequence[str],
    choice: Choice,
    need: Need,
    weigh: Callable[[Samples], Samples] | None = None,
) -> Loaded:
    """Loads the selected samples from files and tables.

    Raises ``KProfilerError`` on failure, or if the files have no samples in the time range.

    ``need`` specifies which sample data to read from tables. ``weigh`` changes the weights of all
    samples from files, before samples are selected.
    """
    files = [source for source in sources if not is_table(source)]
    of_all_sides = choice._replace(sides=())
    parts = [load_table(source, of_all_sides, need) for source in sources if is_table(source)]
    if files:
        loaded = load_profiles(files)
        loaded = weigh(loaded) if weigh else loaded
        timed = choice.cut(loaded)
        if loaded.times and not timed.times:
            raise outside_error(loaded, "--from and --to")
        parts.append(choice.chosen.apply(timed))
        if len(sources) == len(files):
            return Loaded(timed, choice.apply_sides(parts[0]))
    samples = parts[0]
    if len(parts) > 1:
        samples = load_samples(window for part in parts for window in part.windows())
    return Loaded(samples, choice.apply_sides(samples))


def load_table(source: str, choice: Choice, need: Need) -> Samples:
    """Loads the selected samples from a table, by default those from the last hour.

    Disables garbage collection permanently, like :func:`.load_profiles`. Raises ``KProfilerError``.
    """
    gc.disable()
    address = parse_address(source, os.environ)
    chosen = choice.chosen.with_attributes(address.attributes)
    need |= Need.of_attributes(address.attributes)
    with closing(ProfileStore(address)) as store:
        times = _times(store, choice)
        if choice.start is None and choice.end is None:
            say(
                f"{address.place}: showing the last hour; choose other times with --from and --to",
                err=True,
            )
        loaded = store.read(Selection(chosen, times), need, lambda text: say(text, err=True))
    samples = chosen.apply(loaded)
    if not samples:
        say(f"{address.place} has no matching samples in this time range", err=True)
    return samples


def _times(store: ProfileStore, choice: Choice) -> Range:
    """Returns the chosen time range; negative durations are relative to the current time."""
    now = time.time_ns()
    needs_first = any(
        moment is not None and moment.is_from_start for moment in (choice.start, choice.end)
    )
    first = store.first_unix_ns() if needs_first else now
    end = choice.end.unix_ns(first, now) if choice.end else now
    start = choice.start.unix_ns(first, now) if choice.start else max(0, end - _DEFAULT_NS)
    return Range(start, max(start, end))
