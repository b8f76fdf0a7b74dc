"""Opens a file's line table, using symbolic or drgn."""

import importlib.util
import logging

from otel_kprofiler.elf import FileSource
from otel_kprofiler.symbols.user.drgn_lines import DrgnLines
from otel_kprofiler.symbols.user.file import LineTable
from otel_kprofiler.symbols.user.lines import SymbolicLines
from otel_kprofiler.symbols.user.lines_error import LinesError

_log = logging.getLogger(__name__)


class LineTables:
    """Opens source lines with symbolic, or with drgn if symbolic cannot read them all. Thread-safe.

    ``use_drgn`` must be False if lines are looked up in threads that must not block.
    """

    def __init__(self, symbolic: SymbolicLines, *, use_drgn: bool = True) -> None:
        self._symbolic = symbolic
        self._use_drgn = use_drgn and importlib.util.find_spec("drgn") is not None

    def open(self, source: FileSource, path: str, alternate: FileSource | None = None) -> LineTable:
        """Open the line table of a file or its debug file; the caller closes the table.

        Lookups take microseconds, or longer if the DWARF is split or shared with other files; see
        :class:`DrgnLines`. Raises :class:`LinesError` if the lines cannot be opened, or
        :class:`ElfError` if the file cannot be read.
        """
        table = self._symbolic.open(source)
        if table.is_partial and self._use_drgn:
            try:
                return DrgnLines(source, path, alternate=alternate)
            except LinesError as error:
                _log.info("%s: %s; some of its source lines are unknown", path, error)
        return table
