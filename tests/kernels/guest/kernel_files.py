"""Writes to files in /proc, /sys and tracefs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TRACING = "/sys/kernel/tracing"


def write(path: str, text: str) -> None:
    """Writes text in a single call, without append mode's seek, which tracefs rejects."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@contextmanager
def sysctl(name: str, value: int) -> Iterator[None]:
    path = Path("/proc/sys") / name.replace(".", "/")
    before = path.read_text()
    path.write_text(str(value))
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def traced(filters: Iterable[str]) -> Iterator[None]:
    """Traces functions in the ``with`` block. ``*:mod:NAME`` also covers a module loaded later."""
    for text in filters:
        write(f"{TRACING}/set_ftrace_filter", f"{text}\n")
    write(f"{TRACING}/current_tracer", "function")
    try:
        yield
    finally:
        write(f"{TRACING}/current_tracer", "nop")
        Path(f"{TRACING}/set_ftrace_filter").write_text("\n")


@contextmanager
def kprobe_inside(function: str) -> Iterator[None]:
    """Sets a kprobe inside a function. The kernel copies the probed instruction to a new page."""
    for offset in range(6, 64):
        try:
            write(f"{TRACING}/kprobe_events", f"p:kprof/inside {function}+{offset}\n")
            break
        except OSError as error:
            # The offset is not the start of an instruction (on arm64, not a multiple of 4).
            if error.errno not in (errno.EILSEQ, errno.EINVAL):
                raise
    switch = f"{TRACING}/events/kprof/inside/enable"
    try:
        write(switch, "1")
        try:
            yield
        finally:
            write(switch, "0")
    finally:
        write(f"{TRACING}/kprobe_events", "-:kprof/inside\n")
