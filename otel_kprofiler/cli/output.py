"""Chooses an output file's format and name, and checks its path before recording starts."""

from __future__ import annotations

import errno
import gzip
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

from otel_kprofiler.analysis import find_endpoint_parts, load_samples
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.errors import ExportError
from otel_kprofiler.formats import FORMATS, OutputFormat, SpanTime, leave_out_idle
from otel_kprofiler.host import NewFile, open_special, write_all
from otel_kprofiler.model import KERNEL_SIDE, Window
from otel_kprofiler.text import describe_count

if TYPE_CHECKING:
    from otel_kprofiler.cli.part_file import PartFile

_STDOUT: Final = "-"
_GZIP: Final = ".gz"
DEFAULT_NAME: Final = "profile"
_MOST_NAMES: Final = 1000


def _choose_format(path: str, name: str | None) -> OutputFormat:
    if name is not None:
        return next(row for row in FORMATS if row.name == name)
    lower = path.lower().removesuffix(_GZIP)
    matches = [
        (len(suffix), row.name, row)
        for row in FORMATS
        for suffix in (row.suffix, *row.other_suffixes)
        if lower.endswith(suffix)
    ]
    if matches:
        return max(matches)[2]
    suffixes = " ".join(row.suffix for row in FORMATS)
    raise ExportError(
        f"cannot determine the format from the suffix of {path}",
        hint=f"use one of the suffixes {suffixes}, or --format",
    )


class Output:
    """The output of a recording: a device, a pipe, or a file that appears once it is complete.

    If the context is left before :meth:`write`, nothing remains except a ``.part`` file that
    contains samples. Devices and pipes are never replaced.

    Args:
        path: output path; ``-`` is standard output. None means ``profile`` with the format's suffix
            in the working directory, or, if that file exists, the first unused name in the series
            ``profile-2``, ``profile-3``, and so on.
        name: name of a format in :data:`FORMATS`; None to choose by suffix.

    Raises:
        ExportError: no format matches, the file exists and ``force`` is unset, or creation fails.

    Attributes:
        is_special: whether the output is not a regular file.
        part: the ``.part`` file, which keeps samples during the recording; None if none is written.
    """

    def __init__(
        self, path: str | None, name: str | None, *, force: bool, keep_part: bool = False
    ) -> None:
        self._is_numbered = path is None
        if path is None:
            self._format = _choose_format(FORMATS[0].suffix, name)
            path = DEFAULT_NAME + self._format.suffix
        else:
            self._format = _choose_format(path, name)
        self.path = path
        self.part: PartFile | None = None
        self._file: NewFile | None = None
        self._special: int | None = None
        try:
            self._special = sys.stdout.fileno() if path == _STDOUT else open_special(path)
            self.is_special = self._special is not None
            if not self.is_special:
                self._open(path, force=force, keep_part=keep_part)
        except OSError as error:
            raise refusal(path, "-o", error) from error

    def _open(self, path: str, *, force: bool, keep_part: bool) -> None:
        if keep_part:
            from otel_kprofiler.cli.part_file import (  # noqa: PLC0415 - imports exporters
                PartFile,
                find_dead,
            )

            for dead in find_dead(os.path.dirname(path)):
                say(
                    f"{dead} holds the samples from a recording that was killed; "
                    f"next: otel-kprofiler report {dead}",
                    err=True,
                )
        for candidate in number_paths(path) if self._is_numbered else [path]:
            try:
                self._file = NewFile(candidate, mode=0o666, replace=force)
                self.path = candidate
                self.part = PartFile(self._file.path) if keep_part else None
            except OSError as error:
                is_taken = isinstance(error, (FileExistsError, BlockingIOError))
                self.close()
                if not self._is_numbered or not is_taken:
                    raise
            else:
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    @property
    def is_stdout(self) -> bool:
        """Returns whether the output is standard output."""
        return self._special is not None and os.path.sameopenfile(self._special, 1)

    @property
    def next_step(self) -> str:
        """Returns a command that opens the output; empty if the output is not a regular file."""
        if self.is_special:
            return ""
        if self._is_packed and not self._format.is_compressed:
            return f"gunzip {self.path}"
        return self._format.next_step.format(self.path)

    @property
    def _is_packed(self) -> bool:
        return self.path.lower().endswith(_GZIP)

    def write(
        self,
        windows: Sequence[Window],
        title: str = "",
        *,
        idle: bool = True,
        has_whole_threads: bool = True,
    ) -> None:
        """Write the recording.

        A file with kernel addresses is readable only by its owner. If a file of the same name
        appeared during the recording, a numbered name is used. Waits in idle threads are shown only
        if ``idle`` is set; profile files always include them. The time in spans is shown only if
        ``has_whole_threads`` is set, meaning that the recording has all samples from its threads.
        """
        write_page = self._format.write_page
        # Compute span times before idle waits are removed, because spans include idle waits.
        spans = _span_times(windows) if write_page and has_whole_threads else []
        if not idle and not self._format.is_profile:
            windows, left = leave_out_idle(windows)
            if left.samples:
                title = " · ".join(filter(None, [title, "without idle waits"]))
                say(
                    f"{describe_count(left.samples, 'idle wait')} left out, "
                    f"{left.weight_ns / 1e9:,.1f} s; --idle shows them",
                    err=True,
                )
        written = write_page(windows, title, spans) if write_page else self._format.write(windows)
        private = self._format.has_addresses or reveals_addresses(windows)
        self.write_content(written, private=private)

    def write_content(self, written: str | bytes, *, private: bool) -> None:
        """Write formatted content. If ``private``, make the file readable only by its owner."""
        content = written.encode() if isinstance(written, str) else written
        if self._is_packed and not self._format.is_compressed:
            content = gzip.compress(content, mtime=0)
        try:
            self._write(content, private=private)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ExportError(
                f"cannot write {self.path}: {error.strerror}",
                hint="set -o to a path on a disk with free space",
            ) from error
        if self.part:
            self.part.close(keep=False)

    def _write(self, content: bytes, *, private: bool) -> None:
        if self._file is None:
            if self._special is not None:
                write_all(self._special, content)
            return
        if private:
            os.fchmod(self._file.fd, 0o600)
        write_all(self._file.fd, content)
        others = (
            os.path.basename(path) for path in itertools.islice(number_paths(self.path), 1, None)
        )
        named = self._file.path
        self._file.finish(others)
        if self._file.path != named:
            self.path = self._file.path

    def close(self) -> None:
        """Discard unwritten data, except for samples in a ``.part`` file; idempotent."""
        if self._file:
            self._file.abandon()
        if self._special is not None and self.path != _STDOUT:
            os.close(self._special)
            self._special = None
        if self.part and self.part.close(keep=True):
            part, missing = self.part.path, self.part.missing
            rest = f", without {describe_count(missing, 'sample')} that could not be written"
            say(
                f"{part} holds the samples taken so far{rest * bool(missing)}; "
                f"next: otel-kprofiler report {part}",
                err=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _span_times(windows: Sequence[Window]) -> list[SpanTime]:
    profiles = (profile for window in windows for profile in window.profiles)
    if not any(sample.link for profile in profiles for _, sample in profile.samples):
        return []
    return [
        SpanTime(endpoint, traces, [(group.key.name, group.own) for group in parts])
        for endpoint, (traces, parts) in find_endpoint_parts(load_samples(windows))
    ]


def number_paths(path: str) -> Iterator[str]:
    """Yields ``x.html``, ``x-2.html`` and so on."""
    yield path
    stem, suffix = split_suffix(path)
    for number in range(2, _MOST_NAMES):
        yield f"{stem}-{number}{suffix}"


def split_suffix(path: str) -> tuple[str, str]:
    """Splits a path into stem and format suffix, which may be empty."""
    lower = path.lower()
    suffixes = (suffix for row in FORMATS for suffix in (row.suffix, *row.other_suffixes))
    fitting = [suffix for suffix in suffixes if lower.removesuffix(_GZIP).endswith(suffix)]
    longest = max(map(len, fitting), default=0)
    longest += len(_GZIP) if lower.endswith(_GZIP) else 0
    return path[: len(path) - longest], path[len(path) - longest :]


def refusal(path: str, option: str, error: OSError) -> ExportError:
    """Returns the error to raise for a path that is not writable."""
    if isinstance(error, BlockingIOError):
        return ExportError(
            f"another recording is being written to {path}",
            hint=f"wait until it ends, or use a different {option}",
        )
    if error.errno == errno.EEXIST:
        return ExportError(
            f"{path} already exists", hint=f"use --force to replace it, or a different {option}"
        )
    return ExportError(
        f"cannot write {path}: {error.strerror}",
        hint=f"set {option} to a file in an existing, writable directory",
    )


def reveals_addresses(windows: Sequence[Window]) -> bool:
    """Returns whether any kernel frame has a runtime address, which reveals the kernel's layout."""
    return any(
        frame.module is None
        for window in windows
        for _, sample in window.samples
        for side in sample.stack.sides
        if side.kind is KERNEL_SIDE
        for frame in side.frames
    )
