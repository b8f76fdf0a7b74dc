"""Formats a thread dump as text, JSON or folded stacks."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from otel_kprofiler.formats.entries import Entry, stack_entries
from otel_kprofiler.formats.folded import fold_frame, fold_name
from otel_kprofiler.model import ProcessState, ThreadState, WaitState
from otel_kprofiler.text import describe_count, escape_controls

_INDENT: Final = "    "
_MOST_NAMES: Final = 8
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))
_ORDER: Final = {
    None: 0,
    WaitState.RUNNABLE: 1,
    WaitState.UNINTERRUPTIBLE: 2,
    WaitState.STOPPED: 3,
    WaitState.INTERRUPTIBLE: 4,
    WaitState.IDLE: 5,
}
"""Order of thread states. States in which a thread is most likely to block others come first."""


class _Group(NamedTuple):
    threads: Sequence[ThreadState]
    entries: Sequence[Entry]

    @property
    def head(self) -> ThreadState:
        return self.threads[0]

    @property
    def is_idle(self) -> bool:
        cause = self.head.cause
        return cause is not None and cause.is_idle


def dump_table(processes: Iterable[ProcessState], *, width: int | None = None) -> str:
    """Returns the threads of each process as text, grouped by state and stack.

    Stacks are shown leaf first. Running threads are listed first, then threads waiting for a CPU,
    threads in uninterruptible sleep, other threads, and finally threads waiting for work. Within a
    state, larger groups come first. ``width`` is the terminal's width; None for no limit.
    """
    lines: list[str] = []
    for process in processes:
        lines += [*([""] if lines else []), _describe_process(process)]
        for group in _group(process.threads):
            lines += ["", _describe_group(group.threads)]
            lines += [_INDENT[:2] + _name_threads(group.threads)]
            lines += [_INDENT + _describe_entry(entry) for entry in reversed(group.entries)]
    return "".join(f"{_cut(escape_controls(line), width)}\n" for line in lines)


def dump_json(processes: Iterable[ProcessState], *, time: str, interval_s: float | None) -> str:
    """Returns a dump as a JSON object, which contains each distinct stack once.

    ``interval_s`` is the time between two dumps in seconds; None if there was only one.
    """
    stacks: dict[tuple[Entry, ...], int] = {}
    described = [
        {
            "pid": process.tgid,
            "name": process.name,
            "ended_threads": process.ended,
            "threads": [
                _thread_json(thread, stacks.setdefault(stack_entries(thread.stack), len(stacks)))
                for thread in process.threads
            ],
        }
        for process in processes
    ]
    document = {
        "time": time,
        "interval_seconds": interval_s,
        "processes": described,
        "stacks": [[_frame_json(entry) for entry in reversed(stack)] for stack in stacks],
    }
    return json.dumps(document, indent=1) + "\n"


def dump_folded(processes: Iterable[ProcessState]) -> str:
    """Returns lines ``process;outermost;…;leaf;[state or cause] count``, which count threads."""
    counts: Counter[str] = Counter()
    for process in processes:
        for thread in process.threads:
            frames = map(fold_frame, stack_entries(thread.stack))
            does = thread.cause.label if thread.cause else thread.state_label
            counts[";".join((fold_name(process.name), *frames, f"[{does}]"))] += 1
    return "".join(f"{line} {count}\n" for line, count in sorted(counts.items()))


def _group(threads: Iterable[ThreadState]) -> list[_Group]:
    groups: dict[Any, list[ThreadState]] = {}
    for thread in threads:
        entries = stack_entries(thread.stack)
        key = thread.state, thread.cause, thread.has_moved, entries
        groups.setdefault(key, []).append(thread)
    grouped = [_Group(members, key[-1]) for key, members in groups.items()]
    return sorted(
        grouped, key=lambda group: (group.is_idle, _ORDER[group.head.state], -len(group.threads))
    )


def _describe_process(process: ProcessState) -> str:
    text = f"process {process.tgid} ({process.name}): "
    text += describe_count(len(process.threads), "thread")
    return text + (f", {process.ended} ended" if process.ended else "")


def _describe_group(threads: Sequence[ThreadState]) -> str:
    head = threads[0]
    text = f"{describe_count(len(threads), 'thread')}: {head.state_label}"
    if head.cause is not None:
        text += f", {head.cause.label}"
    waits = sorted(thread.waited_ns for thread in threads if thread.waited_ns is not None)
    if waits:
        shortest, longest = describe_ns(waits[0]), describe_ns(waits[-1])
        text += f" for {shortest}" + (f" to {longest}" if longest != shortest else "")
    if head.has_moved is not None:
        text += ", moved" if head.has_moved else ", not moved"
    return text


def _name_threads(threads: Sequence[ThreadState]) -> str:
    names = [
        f"{thread.tid} {thread.name}"
        + (f" (span {thread.link.span_id.hex()})" if thread.link else "")
        for thread in threads[:_MOST_NAMES]
    ]
    rest = len(threads) - len(names)
    return ", ".join(names) + (f" and {rest:,} more" if rest else "")


def _describe_entry(entry: Entry) -> str:
    text = entry.label + (f" [{entry.module}]" if entry.module and not entry.side.has_files else "")
    return f"{text}: {entry.reason}" if entry.reason and entry.name.startswith("[") else text


def describe_ns(duration_ns: int) -> str:
    """Formats a duration: ``250 µs``, ``3.2 ms``, ``12.5 s``, ``2 h 5 m``, ``3 d 4 h``."""
    if duration_ns < 1_000_000:
        return f"{duration_ns // 1000} µs"
    if duration_ns < 1_000_000_000:
        return f"{duration_ns / 1e6:.1f} ms"
    seconds = duration_ns / 1e9
    if seconds < _UNITS[-1][0]:
        return f"{seconds:.1f} s"
    left, parts = int(seconds), list[str]()
    for size, unit in (*_UNITS, (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _thread_json(thread: ThreadState, stack: int) -> dict[str, Any]:
    link = thread.link
    return {
        "tid": thread.tid,
        "name": thread.name,
        "state": thread.state_label,
        "cause": thread.cause.label if thread.cause else None,
        "waited_seconds": None if thread.waited_ns is None else thread.waited_ns / 1e9,
        "context_switches": thread.switches,
        "moved": thread.has_moved,
        "trace_id": link.trace_id.hex() if link else None,
        "span_id": link.span_id.hex() if link else None,
        "labels": dict(thread.labels),
        "stack": stack,
    }


def _frame_json(entry: Entry) -> dict[str, Any]:
    frame = {
        "function": entry.name,
        "side": entry.side.name,
        "module": "" if entry.side.has_files else entry.module,
        "file": entry.file,
        "line": entry.line or None,
        "inlined": entry.inlined,
        "unresolved": entry.reason,
    }
    return {name: value for name, value in frame.items() if value}


def _cut(line: str, width: int | None) -> str:
    return line if not width or len(line) <= width else line[: width - 1] + "…"
