"""Saves unsent samples to a file that ``send`` can deliver later."""

import errno
import os
import re
from collections import Counter
from typing import Final

from otel_kprofiler.cli.output import number_paths, split_suffix
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import ExportOutcome, FileExporter
from otel_kprofiler.host import NewFile
from otel_kprofiler.model import Batch, Form, LossCause

_SUFFIXES: Final = {Form.PROTOBUF: ".unsent.otlp", Form.JSON: ".unsent.otlp.jsonl"}

_MARK: Final = re.compile(r"\.unsent(-\d+)?$")


class UnsentFile:
    """Keeps unsent batches in a file, which is created with an unused name for the first batch.

    Each batch has been written when :meth:`add` returns. The name is derived from ``beside``, the
    path of the file that contains or will contain the samples. Not thread-safe.

    Attributes:
        path: path of the file; empty if no file was created.
        kept: number of samples in the file, by cause of loss.
        problem: the reason why batches could not be kept; empty if all were kept.
    """

    def __init__(self, beside: str, form: Form) -> None:
        self.path = ""
        self.kept: Counter[LossCause] = Counter()
        self.problem = ""
        self._name = _MARK.sub("", split_suffix(beside)[0]) + _SUFFIXES[form]
        self._form = form
        self._exporter: FileExporter | None = None

    def add(self, batch: Batch, cause: LossCause) -> None:
        """Keep an unsent batch, unless it has no samples."""
        if not batch.sample_count or self.problem:
            return
        try:
            exporter = self._exporter = self._exporter or self._create()
        except OSError as error:
            self.problem = f"cannot write {self._name}: {error.strerror}"
            return
        except ExportError as error:
            self.problem = error.message
            return
        result = exporter.export(batch)
        if result.outcome is ExportOutcome.SUCCESS:
            self.kept[cause] += batch.sample_count
        else:
            self.problem = result.message

    def discard(self) -> None:
        """Delete the file. Call this method only if the file's samples are stored elsewhere."""
        self.close()
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._exporter:
            self._exporter.shutdown(0)

    def _create(self) -> FileExporter:
        for path in number_paths(self._name):
            try:
                file = NewFile(path)
                file.finish()
            except FileExistsError:
                continue
            self.path = path
            return FileExporter(path, form=self._form, name="unsent file")
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
