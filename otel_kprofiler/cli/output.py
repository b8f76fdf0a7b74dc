"""Output files of ``record``: chooses the format, and checks the path before recording."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Self

from otel_kprofiler.errors import ExportError
from otel_kprofiler.formats import FORMATS, OutputFormat
from otel_kprofiler.host import NewFile
from otel_kprofiler.model import KERNEL_SIDE, Window


def _choose_format(path: str, name: str | None) -> OutputFormat:
    """The format with this name, or with the suffix of ``path`` if ``name`` is None."""
    for row in FORMATS:
        if row.name == name or (name is None and path.endswith(row.suffix)):
            return row
    suffixes = " ".join(row.suffix for row in FORMATS)
    raise ExportError(
        f"{path}: the suffix matches no format",
        hint=f"use one of the suffixes {suffixes}, or --format",
    )


class Output:
    """A file that is written atomically; ``-`` is standard output.

    The constructor fails if the file exists and must not be replaced, or if its directory is not
    writable. Leaving the context without writing leaves no file behind.

    Args:
        path: where to write.
        name: name of a format in :data:`FORMATS`; None to choose by suffix.
        force: replace an existing file.

    Raises:
        ExportError: no format matches, or the file cannot be created.
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
        """What to do with the file; empty for standard output."""
        return "" if self.path == "-" else self._format.next_step.format(self.path)

    def write(self, windows: Sequence[Window]) -> None:
        """Write the recording; only the owner may read a file with kernel addresses."""
        written = self._format.write(windows)
        content = written.encode() if isinstance(written, str) else written
        if self._file is None:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
            return
        try:
            if self._format.has_addresses or _reveals_addresses(windows):
                os.fchmod(self._file.fd, 0o600)
            with open(self._file.fd, "wb", closefd=False) as file:
                file.write(content)
            self._file.finish()
        except OSError as error:
            raise ExportError(
                f"cannot write {self.path}: {error.strerror}",
                hint="set -o to a path on a disk with free space",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.abandon()


def refusal(path: str, option: str, error: OSError) -> ExportError:
    """The error for a path that cannot be written to."""
    if error.errno == errno.EEXIST:
        return ExportError(
            f"{path} already exists", hint=f"use --force to replace it, or another {option}"
        )
    return ExportError(
        f"cannot write {path}: {error.strerror}",
        hint=f"set {option} to a file in an existing, writable directory",
    )


def _reveals_addresses(windows: Sequence[Window]) -> bool:
    """Whether a kernel frame has only its runtime address, which reveals the kernel's layout."""
    return any(
        frame.module is None
        for window in windows
        for _, sample in window.samples
        for side in sample.stack.sides
        if side.kind is KERNEL_SIDE
        for frame in side.frames
    )
