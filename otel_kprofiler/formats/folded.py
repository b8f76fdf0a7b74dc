"""Writes folded stacks, one line per stack, for flamegraph.pl and compatible tools."""

from collections import Counter
from collections.abc import Iterable
from functools import cache

from otel_kprofiler.formats.entries import Entry, process_name, stack_entries
from otel_kprofiler.formats.weights import weigh
from otel_kprofiler.model import Stack, Window
from otel_kprofiler.text import escape_controls


def folded(windows: Iterable[Window], *, threads: bool = False) -> str:
    """Returns stacks as sorted lines of the form ``process;outermost;…;leaf count``.

    Suffixes follow stackcollapse-perf.pl, and flamegraph.pl derives colors from them: ``_[k]`` for
    kernel code, including modules and BPF programs, ``_[i]`` for inlined functions, and no suffix
    for user frames. Python frames are written as ``function (file.py:42)_[p]``. Unresolved frames
    read ``[module+0xrva]`` or ``[0xaddress]``. In names, ``;`` becomes ``:``, and unprintable
    characters are escaped. If there are several kinds of samples, each kind has a root frame. If
    there are several kinds or sampling periods, counts are in the unit of the kind's ``measure``,
    such as nanoseconds.

    With ``threads``, the thread's ``name/tid`` follows the process.
    """

    @cache
    def text(stack: Stack) -> str:
        return "".join(f";{fold_frame(entry)}" for entry in stack_entries(stack))

    counts: Counter[str] = Counter()
    for kind, resource, sample, weight in weigh(windows):
        root = f"{fold_name(kind)};" if kind else ""
        root += fold_name(process_name(resource, sample.thread_name))
        if threads:
            root += f";{fold_name(sample.thread_name)}/{sample.tid}"
        counts[root + text(sample.stack)] += weight
    return "".join(f"{line} {count}\n" for line, count in sorted(counts.items()))


def fold_frame(entry: Entry) -> str:
    """Returns the label of a frame with the suffix for its kind of code."""
    mark = "_[i]" if entry.inlined else entry.side.folded_mark
    return fold_name(entry.label) + mark


def fold_name(name: str) -> str:
    """Replaces the format's separators in a name, and escapes unprintable characters."""
    return escape_controls(name.replace(";", ":").replace("\n", " ").replace("\r", " "))
