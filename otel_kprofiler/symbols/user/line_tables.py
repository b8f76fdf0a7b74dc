"""Opens the source lines of files, each by the library that reads it best."""

from __future__ import annotations

import importlib.util
import logging

from otel_kprofiler.elf import FileSource
from otel_kprofiler.symbols.user.drgn_lines import DrgnLines
from otel_kprofiler.symbols.user.file import LineTable
from otel_kprofiler.symbols.user.lines import SymbolicLines
from otel_kprofiler.symbols.user.lines_error import LinesError

_log = logging.getLogger(__name__)


class LineTables:
    """Opens files with symbolic, and with drgn what symbolic reads only in part. Thread-safe.

    Args:
        symbolic: what converts and keeps lines.
        use_drgn: whether to use drgn where it is installed; not in threads that must not block.
    """

    def __init__(self, symbolic: SymbolicLines, *, use_drgn: bool = True) -> None:
        self._symbolic = symbolic
        self._use_drgn = use_drgn and importlib.util.find_spec("drgn") is not None

    def open(self, source: FileSource, path: str, alternate: FileSource | None = None) -> LineTable:
        """Open the lines of a file, or of the debug file of it; the caller closes them.

        Look-ups take microseconds, but those of files whose DWARF is split or shared with others
        block for longer: see :class:`DrgnLines`.

        Args:
            source: the file.
            path: where it is.
            alternate: the file that ``.gnu_debugaltlink`` leads to.

        Raises:
            LinesError: a limit was exceeded, or the DWARF is damaged.
            ElfError: the file cannot be read.
        """
        table = self._symbolic.open(source)
        if table.is_partial and self._use_drgn:
            try:
                return DrgnLines(source, path, alternate=alternate)
            except LinesError as error:
                _log.info("%s: %s; parts of its source lines are not known", path, error)
        return table
