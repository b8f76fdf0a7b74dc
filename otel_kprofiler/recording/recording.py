"""Writes and reads recordings: raw samples and all data needed to resolve them on another host.

A recording is a zip archive::

    recording.json          format version, clock offset, sampler facts, counters
    samples/000000 …        blocks of ring records: <u64 complete_until_ns> <u32 length> <bytes>
    events/NAME/000000 …    streams of symbol changes: <u64 time_ns> <u32 length> <bytes>
    resources.json          attributes of the processes, if they were collected
    user_files.json         files to which user stacks refer, if they were collected
    python_codes/000000 …   code objects for Python frames, in blocks with the time 0
    user_names.json         names of user frames, if there are any
    code_names.json         names of code without files, if there are any
    files/…                 the host's files from which kernel symbols are read
    errors.json             errno for files that could not be read

Times are boottimes in nanoseconds. Integers are little-endian. The modules that write event streams
define the streams' names and payloads. Readers skip unknown streams.
"""

import errno
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from otel_kprofiler.bpf import RECORD_VERSION
from otel_kprofiler.checked import checked_number
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import HostFiles, NewFile
from otel_kprofiler.model import (
    Attributes,
    AttributeValue,
    KnownCodes,
    KnownFiles,
    ProcessKey,
    PythonCode,
)
from otel_kprofiler.recording.facts import END_NS, FORMAT_VERSION, RecordingFacts, parse_facts
from otel_kprofiler.recording.python_codes import STREAM as PYTHON_CODES
from otel_kprofiler.recording.python_codes import pack_python_code, parse_python_code
from otel_kprofiler.recording.recorded_files import RecordedFiles
from otel_kprofiler.recording.user_files import NAME as USER_FILES
from otel_kprofiler.recording.user_files import pack_user_files, parse_user_files
from otel_kprofiler.recording.user_names import CODE_NAME as CODE_NAMES
from otel_kprofiler.recording.user_names import NAME as USER_NAMES
from otel_kprofiler.recording.user_names import (
    CodeNameCollector,
    RecordedNames,
    UserNameCollector,
    parse_code_names,
    parse_process_key,
    parse_user_names,
)
from otel_kprofiler.sampling import DAMAGED, MAX_JSON_BYTES, Archive

SYMBOL_FILES: Final = (
    "/proc/kallmodsyms",
    "/proc/kallsyms",
    "/proc/modules",
    "/proc/self/status",
    "/proc/sys/kernel/kptr_restrict",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/perf_event_paranoid",
    "/proc/version",
    "/sys/kernel/notes",
)
"""Files used to resolve kernel symbols, except those in the modules' directories."""
_MODULE_TREES: Final = ("sections", "notes")
_MODULE_FILES: Final = ("coresize", "initstate", "srcversion")
_HEADER: Final = "recording.json"
_BLOCK: Final = struct.Struct("<QI")
_FLUSH_BYTES: Final = 1 << 20
_COMPRESSION_LEVEL: Final = 3

_T = TypeVar("_T")


class RecordingWriter:
    """Writes a recording. The file appears at ``path`` once :meth:`finish` returns.

    Only the owner may read the file, because it contains kernel addresses. ``replace`` allows
    replacing an existing file. Not thread-safe. Raises ``OSError`` if the file cannot be written.
    """

    def __init__(self, path: str, *, replace: bool = True) -> None:
        self._target = NewFile(path, mode=0o600, replace=replace)
        self._file = os.fdopen(self._target.fd, "w+b", closefd=False)
        self._zip = zipfile.ZipFile(
            self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION_LEVEL
        )
        self._pending: dict[str, bytearray] = {}
        self._blocks: dict[str, int] = {}
        self._errors: dict[str, int] = {}

    def capture(self, files: HostFiles) -> None:
        """Copy the files that kernel symbols are read from. Call this once, while sampling."""
        release = ""
        for path in SYMBOL_FILES:
            self._copy(files, path)
        with suppress(OSError):
            release = files.read_bytes("/proc/sys/kernel/osrelease").decode("ascii", "replace")
        if release:
            self._copy(files, f"/lib/modules/{release.strip()}/modules.builtin.ranges")
        for module in self._list(files, "/sys/module"):
            for name in _MODULE_FILES:
                self._copy(files, f"/sys/module/{module}/{name}")
            for tree in _MODULE_TREES:
                for name in self._list(files, f"/sys/module/{module}/{tree}"):
                    self._copy(files, f"/sys/module/{module}/{tree}/{name}")

    def add_records(self, data: bytes, complete_until_ns: int) -> None:
        """Append the records returned by one drain.

        Pass this method to ``EbpfSampler`` as ``raw_sink``.
        """
        self._append("samples", complete_until_ns, data)

    def add_event(self, stream: str, time_ns: int, payload: bytes) -> None:
        """Append an event to a stream of symbol changes, such as module uevents."""
        self._append(f"events/{stream}", time_ns, payload)

    def add_resources(self, resources: Mapping[ProcessKey, Attributes]) -> None:
        """Add process attributes. Call this only once."""
        rows = [[*key, dict(value)] for key, value in resources.items()]
        self._write_json("resources.json", rows)

    def add_user_files(self, files: KnownFiles) -> None:
        """Add the files that contain the addresses in user stacks. Call this method only once."""
        self._write_json(USER_FILES, pack_user_files(files))

    def add_python_codes(self, codes: Iterable[PythonCode]) -> None:
        """Add the code objects of Python frames. Call this method only once."""
        for code in codes:
            self._append(PYTHON_CODES, 0, pack_python_code(code))

    def add_user_names(self, names: UserNameCollector, code: CodeNameCollector) -> None:
        """Add the names of user frames and of code that is not backed by a file; call only once."""
        self._write_json(USER_NAMES, names.rows())
        self._write_json(CODE_NAMES, code.rows())

    def finish(self, facts: RecordingFacts) -> None:
        """Write the remaining data, and move the file to its path."""
        for stream in tuple(self._pending):
            self._flush(stream)
        self._write_json("errors.json", self._errors)
        self._write_json(
            _HEADER,
            {
                "version": FORMAT_VERSION,
                "record_version": RECORD_VERSION,
                **facts._asdict(),
                "events": [list(kind[:3]) for kind in facts.events],
                "waits": [
                    [*process, list(totals.by_state), totals.switches, totals.below_ns]
                    for process, totals in facts.waits.items()
                ],
                "counts": {
                    kind: {
                        **counts._asdict(),
                        "lost": {cause.value: count for cause, count in counts.lost.items()},
                        "filtered": dict(counts.filtered),
                        "truncated": dict(counts.truncated),
                        "locks": dict(counts.locks),
                    }
                    for kind, counts in facts.counts.items()
                },
            },
        )
        self._zip.close()
        self._file.close()
        self._target.finish()

    def abandon(self) -> None:
        """Discard the recording."""
        with suppress(OSError):  # errors do not matter, because the file is discarded
            self._zip.close()
        with suppress(OSError):
            self._file.close()
        self._target.abandon()

    def _append(self, stream: str, time_ns: int, payload: bytes) -> None:
        pending = self._pending.setdefault(stream, bytearray())
        pending += _BLOCK.pack(time_ns, len(payload))
        pending += payload
        if len(pending) >= _FLUSH_BYTES:
            self._flush(stream)

    def _flush(self, stream: str) -> None:
        number = self._blocks.get(stream, 0)
        self._blocks[stream] = number + 1
        self._zip.writestr(f"{stream}/{number:06}", bytes(self._pending.pop(stream)))

    def _copy(self, files: HostFiles, path: str) -> None:
        try:
            content = files.read_bytes(path)
        except OSError as error:
            self._note(path, error)
        else:
            self._zip.writestr("files" + path, content)

    def _list(self, files: HostFiles, path: str) -> list[str]:
        try:
            return files.list_dir(path)
        except OSError as error:
            self._note(path, error)
            return []

    def _note(self, path: str, error: OSError) -> None:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            self._errors[path] = error.errno or errno.EIO

    def _write_json(self, name: str, value: Any) -> None:
        self._zip.writestr(name, json.dumps(value))


class Recording:
    """A recording that is open for reading. Attributes are empty if their data was not recorded.

    Raises ``OSError`` if the file cannot be read, and ``KProfilerError`` if it is not a recording,
    is corrupt, or has an unknown version.
    """

    def __init__(self, path: str) -> None:
        self._archive = Archive(path)
        try:
            self.facts = parse_facts(self._archive.read_json(_HEADER))
            errors = self._archive.read_json("errors.json").items()
            codes = {path: checked_number(code, 1) for path, code in errors}
            self.files: HostFiles = RecordedFiles(self._archive, codes)
            self.resources = _parse_resources(self._rows("resources.json"))
            self.user_files = parse_user_files(self._rows(USER_FILES))
            self.user_names = RecordedNames(
                self.user_files,
                parse_user_names(self._rows(USER_NAMES)),
                parse_code_names(self._rows(CODE_NAMES)),
            )
            self.python_codes = KnownCodes()
            for _, payload in self.blocks(PYTHON_CODES):
                self.python_codes.add(parse_python_code(json.loads(payload)))
        except DAMAGED as error:
            self.close()
            raise KProfilerError(f"{path} is not a recording, or is corrupt: {error}") from error
        except KProfilerError:
            self.close()
            raise

    def blocks(self, stream: str = "samples") -> Iterator[tuple[int, bytes]]:
        """Yields the times and contents of a stream's blocks.

        An event stream is named ``events/NAME``.
        """
        prefix = stream + "/"
        for name in sorted(self._archive.names(prefix)):
            data, at = self._archive.read(name), 0
            while at < len(data):
                try:
                    time_ns, length = _BLOCK.unpack_from(data, at)
                except struct.error as error:
                    raise KProfilerError(
                        f"the member {name} of the recording is corrupt: {error}"
                    ) from error
                at += _BLOCK.size + length
                yield time_ns, data[at - length : at]

    def close(self) -> None:
        """Close the file."""
        self._archive.close()

    def _rows(self, name: str) -> Any:
        """Returns the rows in an archive member; none if the recording lacks the member."""
        return self._archive.read_json(name) if name in self._archive.names(name) else ()


class EventReader(Generic[_T]):
    """Reads a stream of events. ``parse`` converts an event's decoded JSON to items."""

    def __init__(
        self, recording: Recording, stream: str, parse: Callable[[Any], Iterable[_T]]
    ) -> None:
        self._blocks = recording.blocks(f"events/{stream}")
        self._parse = parse
        self._complete_ns = 0

    def poll(self, now_ns: int = END_NS) -> tuple[list[_T], int]:
        """Returns new items, and the boottime (``now_ns`` or later) up to which they are complete.

        Raises ``KProfilerError`` if the recording is corrupt.
        """
        items: list[_T] = []
        while self._complete_ns < now_ns:
            self._complete_ns, payload = next(self._blocks, (END_NS, None))
            if payload is None:
                break
            try:
                if len(payload) > MAX_JSON_BYTES:
                    raise ValueError(f"an event of {len(payload)} bytes is too large")
                items += self._parse(json.loads(payload))
            except DAMAGED as error:
                raise KProfilerError(f"the recording is corrupt: {error}") from error
        return items, self._complete_ns


def _parse_resources(rows: Iterable[Any]) -> dict[ProcessKey, Attributes]:
    return {
        parse_process_key(key): {
            name: _parse_attribute(value) for name, value in attributes.items()
        }
        for *key, attributes in rows
    }


def _parse_attribute(value: Any) -> AttributeValue:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, str | bool | float):
        return value
    return checked_number(value, -END_NS, END_NS - 1)
