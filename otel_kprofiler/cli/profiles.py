"""Reads profile files, detecting their format from the content."""

import gc
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from otel_kprofiler.analysis import Samples, load_samples
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.errors import KProfilerError, PayloadError
from otel_kprofiler.formats import is_pprof, parse_pprof
from otel_kprofiler.model import Window
from otel_kprofiler.otlp import decode_windows, read_file, read_stream, refuse_negative_values
from otel_kprofiler.perf_data import MAGIC, read_perf_data

FIX: Final = "pass a file written by `record`, a Collector's file exporter, perf, or a pprof tool"
_STDIN: Final = "-"
_MAX_UNPACKED_BYTES: Final = 2 << 30
_GZIP: Final = b"\x1f\x8b"
_ZIP: Final = b"PK\x03\x04"
_GZIP_WINDOW: Final = 31  # zlib's code for a gzip header and the largest window
_REPLAY_NS: Final = 1 << 62  # a single window for the whole file
_CONVERT: Final = "otel-kprofiler report {} -o FILE.otlp, then send FILE.otlp"
_OTHERS: Final = {
    b"\x28\xb5\x2f\xfd": ("a file compressed with zstd", "decompress it with `zstd -d`"),
    b"<": ("HTML or XML", "record with -o FILE.otlp, which `report -o` converts to HTML"),
}
"""First bytes of unsupported file formats, each with the format's name and a hint."""

Notify = Callable[[str], None]
"""Callback that receives a message about unreadable data."""


def load_profiles(paths: Sequence[str]) -> Samples:
    """Loads the samples from all files, and reports unreadable data on standard error.

    Turns garbage collection off permanently, because scanning millions of live objects would take
    as long as reading them. Raises ``KProfilerError`` if a file contains no readable part.
    """
    gc.disable()
    return load_samples(
        window
        for path in paths
        for window in read_profile_file(path, lambda problem: say(problem, err=True))
    )


def read_profile_file(path: str, notify: Notify) -> list[Window]:
    """Reads the windows of an OTLP file, a raw recording, or a pprof or perf.data file.

    Reads standard input if the path is ``-``. Decompresses gzip. Uses the readable part of a
    malformed file. Raises ``KProfilerError`` if no part is readable.
    """
    data = _read(path)
    if data.startswith(_ZIP):
        from otel_kprofiler.pipeline import WindowSchedule, replay  # noqa: PLC0415 - import samplers
        from otel_kprofiler.recording import Recording  # noqa: PLC0415 - imports symbols

        windows: list[Window] = []
        with closing(Recording(path)) as recording:
            replay(recording, WindowSchedule(_REPLAY_NS), windows.append)
        return windows
    with _named(path):
        return _parse(data, lambda problem: notify(f"{path}: {problem}"), _find_write_time(path))


def read_unpacked(path: str, notify: Notify) -> bytes:
    """Reads a file (``-``: standard input) and decompresses gzip. May raise ``KProfilerError``."""
    data = _read(path)
    with _named(path):
        return _unpack(data, notify) if data.startswith(_GZIP) else data


def read_otlp_file(path: str, notify: Notify) -> bytes:
    """Reads OTLP profiles (``-``: standard input). Raises ``KProfilerError`` for other formats."""
    data = _read(path)
    with _named(path):
        if data.startswith(_ZIP):
            raise PayloadError(
                "this is a raw recording, not OTLP",
                hint=f"otel-kprofiler record --replay {path} --export URL",
            )
        data = _unpack_profile(data, lambda problem: notify(f"{path}: {problem}"))
        if is_pprof(data):
            raise PayloadError("this is a pprof profile, not OTLP", hint=_CONVERT.format(path))
        if data.startswith(MAGIC):
            raise PayloadError("this is a perf.data file, not OTLP", hint=_CONVERT.format(path))
    return data


def _read(path: str) -> bytes:
    try:
        return read_stream(sys.stdin.buffer, path) if path == _STDIN else read_file(path)
    except OSError as error:
        raise KProfilerError(f"cannot read {path}: {error.strerror}", hint=FIX) from error


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Prepend the path to the message of any ``PayloadError`` raised in the context."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"{path}: {error.message}", hint=error.hint or FIX) from error


def _unpack_profile(data: bytes, notify: Notify) -> bytes:
    if data.startswith(_GZIP):
        data = _unpack(data, notify)
    if not data.strip(b" \t\r\n"):
        raise PayloadError("the file is empty")
    for magic, (what, fix) in _OTHERS.items():
        if data.startswith(magic):
            raise PayloadError(f"this is not a supported profile, but {what}", hint=fix)
    return data


def _find_write_time(path: str) -> int:
    """Returns the Unix time, in nanoseconds, of a file's last write; the current time for stdin."""
    return time.time_ns() if path == _STDIN else os.stat(path).st_mtime_ns


def _parse(data: bytes, notify: Notify, written_unix_ns: int) -> list[Window]:
    data = _unpack_profile(data, notify)
    if data.startswith(MAGIC):
        windows = read_perf_data(data, written_unix_ns, notify)
        refuse_negative_values(windows)
        return windows
    if is_pprof(data):
        windows = parse_pprof(data)
        refuse_negative_values(windows)
        return windows
    first: PayloadError | None = None
    count = 0

    def note(problem: PayloadError) -> None:
        nonlocal first, count
        first, count = first or problem, count + 1

    windows = decode_windows(data, on_damage=note)
    if not windows:
        raise first or PayloadError("the file contains no profiles")
    refuse_negative_values(windows)
    if first:
        more = f", and {count - 1:,} more" if count > 1 else ""
        notify(f"skipped corrupt data: {first.message}{more}")
    return windows


def _unpack(data: bytes, notify: Notify) -> bytes:
    """Decompresses a gzip file, which may have several members, up to the first corrupt byte."""
    unpacked = bytearray()
    while data:
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            unpacked += unpacker.decompress(data, _MAX_UNPACKED_BYTES - len(unpacked))
        except zlib.error as error:
            notify(f"skipped corrupt data: {error}")
            break
        if unpacker.unconsumed_tail:
            raise PayloadError(f"the decompressed file exceeds {_MAX_UNPACKED_BYTES >> 30} GiB")
        if not unpacker.eof:
            notify("the compressed data is truncated")
        data = unpacker.unused_data.lstrip(b"\0")
    return bytes(unpacked)
