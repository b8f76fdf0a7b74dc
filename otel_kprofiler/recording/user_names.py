"""Stores user-frame names in recordings, so replays do not require the recorded host's files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from otel_kprofiler.checked import checked_number, checked_text
from otel_kprofiler.model import (
    BuildId,
    FileDetails,
    FileId,
    FileKey,
    Frame,
    KnownFiles,
    Line,
    ModuleKind,
    OpenFile,
    ProcessKey,
    Stack,
    Unresolved,
    Window,
)
from otel_kprofiler.symbols import NamedAddress

NAME: Final = "user_names.json"
"""Archive member with the names of user frames. A row contains a file's build id and hash, an
address (SVMA), the start of the function at the address (0 if there is none), the reason for a
missing name (otherwise empty), and the source lines."""

CODE_NAME: Final = "code_names.json"
"""Archive member with the names of code that belongs to no file, such as JIT code. A row contains a
process key, an address, and the names at the address. Each name consists of the boottimes of the
first and the last sample that it applies to, in nanoseconds, and the last three fields of a row in
:data:`NAME`."""

Place = tuple[BuildId | None, FileId, int]
CodePlace = tuple[ProcessKey, int]
_UNKNOWN: Final = NamedAddress((), 0, Unresolved.USER_ADDRESS)
_NO_FILE: Final = NamedAddress((), 0, Unresolved.NO_FILE)
_REASONS: Final = {reason.name: reason for reason in Unresolved}


class NamedRun(NamedTuple):
    """The name of an address in the interval between two samples, in boottime nanoseconds."""

    since_ns: int
    until_ns: int
    named: NamedAddress

    def distance(self, at_ns: int) -> tuple[int, int]:
        """Returns a sort key: a time's distance from the interval, then the interval's length."""
        away = max(self.since_ns - at_ns, at_ns - self.until_ns, 0)
        return away, self.until_ns - self.since_ns


class CodeNameCollector:
    """Collects the names resolved for code that is not in a file; not thread-safe."""

    def __init__(self) -> None:
        self._runs: dict[CodePlace, list[NamedRun]] = {}

    def add(self, process: ProcessKey, address: int, at_ns: int, named: NamedAddress) -> None:
        """Add the name for an address in a process, as of the boottime ``at_ns``."""
        if named.unresolved is Unresolved.SYMBOLS_PENDING:
            return  # unfinished; the stack will be resolved again later
        runs = self._runs.setdefault((process, address), [])
        if runs and runs[-1].named == named:
            since_ns, until_ns, _ = runs.pop()
            runs.append(NamedRun(min(since_ns, at_ns), max(until_ns, at_ns), named))
        else:
            runs.append(NamedRun(at_ns, at_ns, named))

    def rows(self) -> list[list[object]]:
        """Returns JSON rows, omitting addresses that never had a name."""
        return [
            [*process, address, [[since, until, *_pack(named)] for since, until, named in runs]]
            for (process, address), runs in self._runs.items()
            if any(run.named.lines for run in runs)
        ]


class UserNameCollector:
    """Collects user frame names from windows; not thread-safe."""

    def __init__(self) -> None:
        self._named: dict[Place, NamedAddress] = {}

    def add(self, window: Window) -> None:
        """Add the names of a window's frames."""
        stacks: dict[int, Stack] = {id(sample.stack): sample.stack for _, sample in window.samples}
        for stack in stacks.values():
            for frame in stack.frames:
                self.add_frame(frame)

    def add_frame(self, frame: Frame) -> None:
        """Add the name of a frame, even if the frame is not in any window."""
        module = frame.module
        if module is None or module.kind is not ModuleKind.USER:
            return
        if frame.unresolved is not Unresolved.USER_ADDRESS:
            start = frame.address - frame.offset if frame.lines or frame.offset else 0
            named = NamedAddress(frame.lines, start, frame.unresolved)
            self._named[module.build_id, module.file_id, frame.address] = named

    def rows(self) -> list[list[object]]:
        """Returns the collected names as JSON rows."""
        return [
            [build_id, file_id, address, *_pack(named)]
            for (build_id, file_id, address), named in self._named.items()
        ]


class RecordedNames:
    """Names user frames from a recording; implements ``UserNames``.

    ``named`` contains the names for addresses in files, keyed by build id, hash and address.
    ``code`` contains the names for addresses in processes, in sample order.
    """

    version = 0

    def __init__(
        self,
        files: KnownFiles,
        named: Mapping[Place, NamedAddress],
        code: Mapping[CodePlace, Sequence[NamedRun]],
    ) -> None:
        self._files, self._named, self._code = files, named, code

    def add(
        self, key: FileKey, details: FileDetails, content: OpenFile | bytes, owner: int = 0
    ) -> None:
        """Does nothing, because a replay opens no files."""

    def name(self, key: FileKey, address: int) -> NamedAddress:
        """Returns the recorded name of an address in a file."""
        details = self._files.get(key)
        if details is None:
            return _UNKNOWN
        return self._named.get((details.build_id, details.file_id, address), _UNKNOWN)

    def name_code(self, process: ProcessKey, address: int, at_ns: int) -> NamedAddress:
        """Returns the name recorded for an address at, or nearest to, the given time."""
        runs = self._code.get((process, address))
        return min(runs, key=lambda run: run.distance(at_ns)).named if runs else _NO_FILE

    def finish(self, timeout_s: float) -> None:
        """Does nothing, because all names are recorded."""

    def close(self) -> None:
        """Does nothing, because there is nothing to release."""


def parse_user_names(rows: Iterable[Any]) -> dict[Place, NamedAddress]:
    """Unpacks the rows that :meth:`UserNameCollector.rows` returned.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` if a row is malformed.
    """
    named = {}
    for build_id, file_id, address, *rest in rows:
        place = (
            None if build_id is None else BuildId(checked_text(build_id)),
            FileId(checked_text(file_id)),
            checked_number(address),
        )
        named[place] = _parse(*rest)
    return named


def parse_code_names(rows: Iterable[Any]) -> dict[CodePlace, list[NamedRun]]:
    """Unpacks the rows of :meth:`CodeNameCollector.rows`, like :func:`parse_user_names`."""
    code = {}
    for *key, address, runs in rows:
        code[parse_process_key(key), checked_number(address)] = [
            NamedRun(checked_number(since), checked_number(until), _parse(*rest))
            for since, until, *rest in runs
        ]
    return code


def parse_process_key(row: Iterable[Any]) -> ProcessKey:
    """Parses a process key from its JSON array; see :func:`parse_user_names` for errors."""
    tgid, start_ns, exec_id, owner = row
    return ProcessKey(
        checked_number(tgid),
        None if start_ns is None else checked_number(start_ns),
        checked_number(exec_id),
        None if owner is None else checked_number(owner),
    )


def _pack(named: NamedAddress) -> tuple[object, ...]:
    reason = named.unresolved
    return named.start, reason.name if reason else "", named.lines


def _parse(start: Any, reason: Any, lines: Any) -> NamedAddress:
    names = tuple(
        Line(checked_text(name), checked_text(system), checked_text(file), *_parse_numbers(rest))
        for name, system, file, *rest in lines
    )
    why = _REASONS[checked_text(reason)] if reason else None
    if (why is None) != bool(names):
        raise ValueError("a frame must have either names or a reason why names are missing")
    return NamedAddress(names, checked_number(start), why)


def _parse_numbers(rest: Iterable[Any]) -> tuple[int, int]:
    """Returns a line number and the line on which its function starts (0 if not recorded)."""
    line, start = [*map(checked_number, rest), 0][:2]
    return line, start
