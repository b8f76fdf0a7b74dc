"""Output files of ``record``: the form follows the suffix, and the place is checked first."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Self

from otel_kprofiler.errors import ExportError
from otel_kprofiler.formats import FORMATS, OutputFormat
from otel_kprofiler.host import NewFile
from otel_kprofiler.model import FrameKind, Window


def _choose_format(path: str, name: str | None) -> OutputFormat:
    """The format with this name; by the suffix of ``path`` if there is no name."""
    for row in FORMATS:
        if row.name == name or (name is None and path.endswith(row.suffix)):
            return row
    suffixes = " ".join(row.suffix for row in FORMATS)
    raise ExportError(
        f"{path}: the format cannot be told from the name",
        hint=f"use one of the suffixes {suffixes}, or give --format",
    )


class Output:
    """A file that is replaced as a whole when it is written; ``-`` is the standard output.

    Opening fails, before any work, if the file exists and must not be replaced, or if its
    directory cannot be written to. Leaving the context without writing leaves no trace.

    Args:
        path: where to write.
        name: of a row of :data:`FORMATS`; by the suffix if None.
        force: replace an existing file.
    """

    def __init__(self, path: str, name: str | None, *, force: bool) -> None:
        self.path = path
        self._format = _choose_format(path, name)
        self._file: NewFile | None = None
        if path != "-":
            try:
                self._file = NewFile(path, mode=0o666, replace=force)
            except OSError as error:
                raise refusal(path, "-o", error) from error

    @property
    def next_step(self) -> str:
        """What users do with the file; empty for the standard output."""
        return "" if self.path == "-" else self._format.next_step.format(self.path)

    def write(self, windows: Sequence[Window]) -> None:
        """Write the recording; a file that tells kernel addresses is for its owner only."""
        written = self._format.write(windows)
        content = written.encode() if isinstance(written, str) else written
        if self._file is None:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
            return
        try:
            if self._format.has_addresses or _tells_addresses(windows):
                os.fchmod(self._file.fd, 0o600)
            with open(self._file.fd, "wb", closefd=False) as file:
                file.write(content)
            self._file.finish()
        except OSError as error:
            raise ExportError(
                f"cannot write {self.path}: {error.strerror}",
                hint="give an -o on a disk with free space, in a directory that stays there",
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
