"""Looks up source lines with drgn, in a child process.

Each line of standard input is an address (SVMA) in hexadecimal. The first line of standard output
states why the file cannot be read, and is empty on success. Each subsequent line is a response in
JSON: ``[[function, file, line], …]``, innermost first. The process exits when it has received no
requests for a while.
"""

import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from otel_kprofiler.elf import FileSource, read_load_addresses
from otel_kprofiler.host import give_up_capabilities, limit_resources

_SHOWN: Final = 200


class Task(NamedTuple):
    """The files that the worker process reads, and the worker's idle timeout.

    Attributes:
        alternate: descriptor of the alternate debug file written by dwz(1); -1 if there is none.
        path: path of the file, used to find adjacent files (``.dwp``).
    """

    idle_s: float
    fd: int
    alternate: int
    path: str


def main() -> None:
    """Handle requests; the only argument is a :class:`Task` as JSON."""
    task = Task(*json.loads(sys.argv[1]))
    limit_resources({})
    try:
        look_up = _open(task)
    except Exception as error:  # noqa: BLE001 - a third party's, reported to the parent
        _answer(f"{type(error).__name__}: {error}"[:_SHOWN].replace("\n", " "))
        return
    _answer("")
    while select.select([0], [], [], task.idle_s)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        _answer(json.dumps(look_up(int(line, 16))))


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _open(task: Task) -> Callable[[int], list[tuple[str, str, int]]]:
    import drgn  # noqa: PLC0415 - within the limits

    give_up_capabilities("CAP_DAC_READ_SEARCH")  # use only files that the user may read

    program: Any = drgn.Program(drgn.host_platform)
    program.set_enabled_debug_info_finders([])  # use only the task's files
    module: Any = program.extra_module(task.path, create=True)
    loads = read_load_addresses(FileSource(task.fd, os.fstat(task.fd).st_size))
    if loads:
        starts, ends = zip(*loads, strict=True)
        module.address_range = min(starts), max(ends)
    for fd in (task.fd, task.alternate):
        if fd >= 0:
            module.try_file(task.path, fd=fd, force=True)
    if module.debug_file_status != drgn.ModuleFileStatus.HAVE:
        raise ValueError(f"the DWARF data cannot be read: {module.debug_file_status.name}")
    bias = module.debug_file_bias

    def look_up(address: int) -> list[tuple[str, str, int]]:
        lines = []
        # drgn treats addresses as return addresses, and looks up the preceding byte.
        for frame in program.stack_trace_from_pcs([address + bias + 1]):
            try:
                file, line, _ = frame.source()
            except LookupError:
                file, line = "", 0
            lines.append((frame.function_name or "?", file, line))
        with suppress(LookupError):  # unlike DWARF names, symbols include namespaces and parameters
            lines[-1] = (program.symbol(address + bias).name, *lines[-1][1:])
        return lines if len(lines) > 1 or lines[0][1] else []

    return look_up
