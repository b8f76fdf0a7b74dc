"""Output files of ``record``: the form follows the suffix, and the place is checked first."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, Self

from otel_kprofiler.errors import ExportError
from otel_kprofiler.host import NewFile
from otel_kprofiler.model import Form, FrameKind, Window

Writer = Callable[[Sequence[Window]], bytes]


def _otlp(windows: Sequence[Window]) -> bytes:
    return _encode(windows, Form.PROTOBUF)


def _otlp_lines(windows: Sequence[Window]) -> bytes:
    encoded = _encode(windows, Form.JSON)
    return encoded + b"\n" if encoded else b""


def _encode(windows: Sequence[Window], form: Form) -> bytes:
    from otel_kprofiler.otlp import encode_window  # noqa: PLC0415 - only for OTLP outputs

    batches = [batch for window in windows for batch in encode_window(window, form=form).batches]
    if len(batches) > 1:
        raise ExportError("a recording must be one message")
    return batches[0].payload if batches else b""


def _folded(windows: Sequence[Window]) -> bytes:
    from otel_kprofiler.formats import folded  # noqa: PLC0415 - reports load only when written

    return folded(windows).encode()


def _table(windows: Sequence[Window]) -> bytes:
    from otel_kprofiler.formats import table  # noqa: PLC0415

    return table(windows).encode() + b"\n"


def _html(windows: Sequence[Window]) -> bytes:
    from otel_kprofiler.formats import html  # noqa: PLC0415

    return html(windows).encode()


def _pprof(windows: Sequence[Window]) -> bytes:
    from otel_kprofiler.formats import pprof  # noqa: PLC0415

    return pprof(windows)


def _speedscope(windows: Sequence[Window]) -> bytes:
    from otel_kprofiler.formats import speedscope  # noqa: PLC0415

    return speedscope(windows).encode()


FORMATS: Final[dict[str, tuple[str, Writer]]] = {
    "html": (".html", _html),
    "otlp": (".otlp", _otlp),
    "otlp-json": (".otlp.jsonl", _otlp_lines),
    "folded": (".folded", _folded),
    "table": (".txt", _table),
    "pprof": (".pprof", _pprof),
    "speedscope": (".speedscope.json", _speedscope),
}
"""Name of the format → suffix and writer."""


def find_format(path: str) -> str | None:
    """The format that the suffix of ``path`` stands for."""
    for name, (suffix, _writer) in FORMATS.items():
        if path.endswith(suffix):
            return name
    return None


class Output:
    """A file that is replaced as a whole when it is written; ``-`` is the standard output.

    Opening fails, before any work, if the file exists and must not be replaced, or if its
    directory cannot be written to. Leaving the context without writing leaves no trace.

    Args:
        path: where to write.
        name: a key of :data:`FORMATS`; by the suffix if None.
        force: replace an existing file.
    """

    def __init__(self, path: str, name: str | None, *, force: bool) -> None:
        found = name or find_format(path)
        if found is None:
            suffixes = " ".join(suffix for suffix, _writer in FORMATS.values())
            raise ExportError(
                f"{path}: the format cannot be told from the name",
                hint=f"use one of the suffixes {suffixes}, or give --format",
            )
        self.path = path
        self.format = found
        self._writer = FORMATS[found][1]
        self._file: NewFile | None = None
        if path != "-":
            try:
                self._file = NewFile(path, mode=0o666, replace=force)
            except OSError as error:
                raise refusal(path, "-o", error) from error

    def write(self, windows: Sequence[Window]) -> None:
        """Write the recording; a file that tells kernel addresses is for its owner only."""
        content = self._writer(windows)
        if self._file is None:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
            return
        try:
            if self.format == "pprof" or _tells_addresses(windows):
                os.fchmod(self._file.fd, 0o600)
            with open(self._file.fd, "wb", closefd=False) as file:
                file.write(content)
            self._file.finish()
        except OSError as error:
            raise ExportError(
                f"cannot write {self.path}: {error.strerror}",
                hint="give an -o on a disk with room, in a directory that stays there",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.abandon()


def refusal(path: str, option: str, error: OSError) -> ExportError:
    """What to say of a place that cannot be written to."""
    if error.errno == errno.EEXIST:
        return ExportError(
            f"{path} exists already", hint=f"give --force to replace it, or another {option}"
        )
    return ExportError(
        f"cannot write {path}: {error.strerror}",
        hint=f"give {option} a file in a directory that exists and that you may write to",
    )


def _tells_addresses(windows: Sequence[Window]) -> bool:
    """Whether a kernel frame has nothing but its runtime address, which tells where it lies."""
    return any(
        frame.module is None and frame.kind is not FrameKind.USER
        for window in windows
        for group in window.resources
        for sample in group.samples
        for frame in sample.stack.leading
    )
