"""Looks up a file's functions, and builds the names shown in frames."""

import re
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple, Protocol

from otel_kprofiler.model import Line, Unresolved
from otel_kprofiler.symbols.user.functions import Function, FunctionTable
from otel_kprofiler.symbols.user.lines_error import LinesProblem


class NamedAddress(NamedTuple):
    """The functions and lines at an address.

    Attributes:
        lines: functions, innermost inlined function first; empty if there is no name.
        start: start address of the enclosing non-inlined function; 0 if there is no name.
        unresolved: why there is no name; None if there is a name.
        is_interim: whether a later lookup may return more details, such as source lines.
    """

    lines: tuple[Line, ...]
    start: int
    unresolved: Unresolved | None
    is_interim: bool = False

    def offset(self, address: int) -> int:
        """Returns the distance from the function's start in bytes; 0 if there is no function."""
        return address - self.start if self.start else 0


class LineTable(Protocol):
    """The source lines and inlined functions for one file; thread-safe."""

    def lookup(self, svma: int) -> tuple[Line, ...]:
        """Returns the functions at an address, innermost inlined first; empty if unknown."""

    @property
    def nbytes(self) -> int:
        """Returns the memory that the table uses in this process."""


_MAX_LINES_KEPT: Final = 256
MAX_CANDIDATES: Final = 10_000
"""Maximum number of names that a search demangles. Demangling this many names takes about 50 ms."""
_IDENTIFIER: Final = re.compile(r"[^\W\d]\w*")
_ARGUMENTS: Final = re.compile(r"<[^<>]*>")  # template arguments
NO_FILE: Final = NamedAddress((), 0, Unresolved.NO_FILE)
NOT_ASKED: Final = NamedAddress((), 0, Unresolved.USER_ADDRESS)
PENDING: Final = NamedAddress((), 0, Unresolved.SYMBOLS_PENDING)
NO_SYMBOL_TABLE: Final = NamedAddress((), 0, Unresolved.NO_SYMBOL_TABLE)
_NO_SYMBOL = NamedAddress((), 0, Unresolved.NO_SYMBOL)


class FileSymbols:
    """The names of a file's functions, by address (SVMA); thread-safe.

    Args:
        lines: source lines and inlined functions; None to omit both from results.
        lines_problem: why lines cannot be read; None if they can be read, or if the file has no
            lines.
        can_retry_lines: whether rereading the unchanged file may yield its lines.
    """

    def __init__(
        self,
        functions: FunctionTable,
        demangle: Callable[[str], str],
        lines: LineTable | None = None,
        lines_problem: LinesProblem | None = None,
        *,
        can_retry_lines: bool = False,
    ) -> None:
        self.functions = functions
        self._demangle = demangle
        self._lines = lines
        self.lines_problem = lines_problem
        self.can_retry_lines = can_retry_lines
        self._made: dict[str, Line] = {}

    @property
    def nbytes(self) -> int:
        """Returns the memory that the tables use."""
        return self.functions.nbytes + (self._lines.nbytes if self._lines else 0)

    def name(self, svma: int) -> NamedAddress:
        """Returns the functions at an address."""
        if not len(self.functions):
            return NO_SYMBOL_TABLE
        function = self.functions.lookup(svma)
        lines = self._lines.lookup(svma) if self._lines else ()
        start = function.start if function else 0
        if lines:
            lines = tuple([self._keep_plain(line) for line in lines])
            return NamedAddress(self._name_by_symbol(lines, function), start, None)
        if function is None:
            return _NO_SYMBOL
        if not function.name:
            return NamedAddress((), start, Unresolved.NO_NAME)
        return NamedAddress((self.make_line(function.name),), start, None)

    def find(self, name: str) -> tuple[Function, ...]:
        """Finds functions by linkage name or, failing that, demangled name, in address order.

        A demangled name without parameters matches functions with any parameters. Compares at most
        ``MAX_CANDIDATES`` names that contain the last identifier of ``name``.
        """
        if found := self.functions.find(name):
            return found
        plain = name.partition("(")[0]
        while plain != (shorter := _ARGUMENTS.sub("", plain)):
            plain = shorter
        identifiers = [one for one in _IDENTIFIER.findall(plain) if one != "operator"]
        if not identifiers:
            return ()
        # In mangled names, each identifier is preceded by its length.
        part = f"{len(identifiers[-1].encode())}{identifiers[-1]}"
        candidates = islice(self.functions.find_containing(part), MAX_CANDIDATES)
        return tuple(one for one in candidates if _is_called(self._demangle(one.name), name))

    def _name_by_symbol(
        self, lines: tuple[Line, ...], function: Function | None
    ) -> tuple[Line, ...]:
        """Names the physical function after its symbol.

        DWARF contains no names for function parts such as ``f.cold``, and names an alias after the
        original function.
        """
        if function is None or not function.name:
            return lines
        last = self.make_line(function.name)
        return (
            *lines[:-1],
            lines[-1]._replace(function=last.function, system_name=last.system_name),
        )

    def _keep_plain(self, line: Line) -> Line:
        """Renames a function whose name the line table shortened although it is not mangled."""
        if not line.system_name or line.system_name.startswith("_"):
            return line
        plain = self.make_line(line.system_name)
        return line._replace(function=plain.function, system_name=plain.system_name)

    def make_line(self, name: str) -> Line:
        """Returns a linkage name as shown in frames, usually from a cache."""
        line = self._made.get(name)
        if line is None:
            readable = self._demangle(name)
            if len(self._made) >= _MAX_LINES_KEPT:
                self._made.clear()
            line = self._made[name] = Line(readable, name if readable != name else "")
        return line


def _is_called(readable: str, name: str) -> bool:
    """Returns whether a demangled name equals ``name``, ignoring return type and parameters."""
    before, found, behind = readable.partition(name)
    return bool(found) and before[-1:] in ("", " ") and behind[:1] in ("", "(")
