"""Determines the callers and callees of a function."""

from collections.abc import Callable
from typing import Final

from otel_kprofiler.analysis.filters import matcher
from otel_kprofiler.analysis.groups import Group, collect
from otel_kprofiler.analysis.occurrences import Key, Occurrence, function_key
from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.formats import Entry, stack_entries
from otel_kprofiler.model import Stack

NO_CALLER: Final = Key("[no caller]")
ITSELF: Final = Key("[itself]")


def callers(samples: Samples, function: str | Key) -> list[Group]:
    """Groups samples by a function's caller; in recursion, by the caller of the outermost call.

    Samples whose stacks lack the function are omitted, so the groups' weights add up to the
    function's total weight. ``function`` may be a pattern, or the key of a single group.
    """
    return collect(samples, _neighbour(function, lambda calls: (calls[0] - 1, NO_CALLER)))


def callees(samples: Samples, function: str | Key) -> list[Group]:
    """Groups samples by a function's callee; in recursion, by the callee of the innermost call."""
    return collect(samples, _neighbour(function, lambda calls: (calls[-1] + 1, ITSELF)))


def _neighbour(
    function: str | Key, choose: Callable[[list[int]], tuple[int, Key]]
) -> Callable[[Stack], Occurrence | None]:
    is_wanted = _is_key(function) if isinstance(function, Key) else _is_named(function)

    def occurrence(stack: Stack) -> Occurrence | None:
        entries = stack_entries(stack)
        calls = [at for at, entry in enumerate(entries) if is_wanted(entry)]
        if not calls:
            return None
        at, outside = choose(calls)
        key = function_key(entries[at]) if 0 <= at < len(entries) else outside
        return Occurrence(key, (key,))

    return occurrence


def _is_named(pattern: str) -> Callable[[Entry], bool]:
    is_wanted = matcher([pattern])
    return lambda entry: is_wanted(entry.name)


def _is_key(key: Key) -> Callable[[Entry], bool]:
    return lambda entry: function_key(entry) == key
