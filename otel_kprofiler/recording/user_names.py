"""Names of user frames in recordings, so that replays need none of the recorded host's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

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
"""Name in the archive. A row has the build id and hash of a file, an address (SVMA), where its
function starts (0 if it is in none), why it has no name (else empty), and the lines."""

Place = tuple[BuildId | None, FileId, int]
_UNKNOWN: Final = NamedAddress((), 0, Unresolved.USER_ADDRESS)
_NO_FILE: Final = NamedAddress((), 0, Unresolved.NO_FILE)
_REASONS: Final = {reason.name: reason for reason in Unresolved}


class UserNameCollector:
    """Collects the names of user frames from windows; not thread-safe."""

    def __init__(self) -> None:
        self._named: dict[Place, NamedAddress] = {}

    def add(self, window: Window) -> None:
        """Take the names of a window's frames."""
        stacks: dict[int, Stack] = {id(one.stack): one.stack for _, one in window.samples}
        for stack in stacks.values():
            for frame in stack.frames:
                self.add_frame(frame)

    def add_frame(self, frame: Frame) -> None:
        """Take the name of a frame, such as one in whose place Python frames stand."""
        module = frame.module
        if module is None or module.kind is not ModuleKind.USER:
            return
        if frame.unresolved is not Unresolved.USER_ADDRESS:
            start = frame.address - frame.offset if frame.lines or frame.offset else 0
            named = NamedAddress(frame.lines, start, frame.unresolved)
            self._named[module.build_id, module.file_id, frame.address] = named

    def rows(self) -> list[list[object]]:
        """Rows for JSON."""
        return [
            [build_id, file_id, address, start, reason.name if reason else "", lines]
            for (build_id, file_id, address), (lines, start, reason) in self._named.items()
        ]


class RecordedNames:
    """Names of user frames from a recording; satisfies ``UserNames``.

    Args:
        files: the files of the recording.
        named: what is at an address of a file, by build id, hash and address.
    """

    version = 0

    def __init__(self, files: KnownFiles, named: Mapping[Place, NamedAddress]) -> None:
        self._files, self._named = files, named

    def add(self, key: FileKey, details: FileDetails, content: OpenFile | bytes) -> None:
        """Nothing is opened during a replay."""

    def name(self, key: FileKey, address: int) -> NamedAddress:
        """What was recorded of an address."""
        details = self._files.get(key)
        if details is None:
            return _UNKNOWN
        return self._named.get((details.build_id, details.file_id, address), _UNKNOWN)

    def name_code(self, process: ProcessKey, address: int, at_ns: int) -> NamedAddress:
        """Names of code without files are not recorded."""
        return _NO_FILE

    def finish(self, timeout_s: float) -> None:
        """Everything is known."""

    def close(self) -> None:
        """Nothing is held."""


def parse_user_names(rows: Iterable[Any]) -> dict[Place, NamedAddress]:
    """The inverse of :meth:`UserNameCollector.rows`.

    Raises:
        ValueError: a row is damaged; or ``TypeError`` or ``KeyError``.
    """
    named = {}
    for build_id, file_id, address, start, reason, lines in rows:
        place = (
            None if build_id is None else BuildId(checked_text(build_id)),
            FileId(checked_text(file_id)),
            checked_number(address),
        )
        found = tuple(
            Line(
                checked_text(name), checked_text(system), checked_text(file), *_parse_numbers(rest)
            )
            for name, system, file, *rest in lines
        )
        why = _REASONS[checked_text(reason)] if reason else None
        if (why is None) != bool(found):
            raise ValueError("a frame needs a name, or the reason for none")
        named[place] = NamedAddress(found, checked_number(start), why)
    return named


def _parse_numbers(rest: Iterable[Any]) -> tuple[int, int]:
    """The line, and that at which the function starts; 0 in recordings that lack it."""
    line, start = [*map(checked_number, rest), 0][:2]
    return line, start
