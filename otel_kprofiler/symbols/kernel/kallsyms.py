r"""Parses ``/proc/kallsyms``, System.map and the output of ``nm -n``.

A line is ``%016x %c %s\n``, with ``\t[module]`` before the line end for symbols outside vmlinux
(kernel/kallsyms.c, ``s_show``). The vmlinux symbols come first, sorted by address, followed by
unsorted blocks: the live modules, ftrace's clones of module init functions, the
``[__builtin__ftrace]`` trampolines, ``[bpf]`` programs and ``[__builtin__kprobes]`` pages.
"""

from __future__ import annotations

from array import array
from binascii import unhexlify
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from operator import ne
from typing import Final, NamedTuple

from otel_kprofiler.elf import is_mapping_symbol, marks_data
from otel_kprofiler.symbols.kernel.build import END_TYPE, TEXT_TYPES, TableBuilder, parse_addresses
from otel_kprofiler.symbols.kernel.names import PAD_PREFIX, PREAMBLE
from otel_kprofiler.symbols.kernel.table import MAX_FUNCTION_BYTES, SymbolTable

BPF_BLOCK: Final = "bpf"
OUT_OF_LINE_BLOCKS: Final = ("__builtin__ftrace", "__builtin__kprobes")
NO_MODULES: Final = (BPF_BLOCK, *OUT_OF_LINE_BLOCKS)
PAGE_BYTES: Final = 4096

_HEX_DIGITS = 16
_LAST_ADDRESS = (1 << 64) - 1
_HIDDEN = b"0" * _HEX_DIGITS
_CORE_FIELDS, _MODULE_FIELDS = 3, 4
_MAX_ALIAS_LINES = 256  # per address, to bound memory use on hostile input
_MAX_REST_BYTES = 1 << 20
_SORTED_LINES = 1024  # lines added to a module's table per batch
_PREAMBLE = b" __cfi_"
_LOCAL = b" t "
_MANY_FUNCTIONS = 500  # enough to determine whether functions have preambles
_IS_TEXT = bytes(code in TEXT_TYPES for code in range(256))
_IS_OTHER = bytes(code not in TEXT_TYPES for code in range(256))


class FreedSymbol(NamedTuple):
    """A symbol that ftrace keeps for an init function whose memory has been freed."""

    address: int
    name: str
    module: str


class Kallsyms(NamedTuple):
    """The content of a kallsyms file.

    Attributes:
        core: the symbols in vmlinux, including init code.
        blocks: the other symbols, by the bracketed name (such as ``ext4``), in file order.
        freed: symbols that ftrace keeps for freed init functions; never used to resolve frames.
        bad_lines: the number of malformed or out-of-order lines that were skipped. A skipped line
            ends the preceding function, which might otherwise include the skipped symbol's code.
        hidden: whether all addresses are zero, in which case there are no symbols.
        cut: whether the last line is incomplete. If it is, the line and all symbols in its module,
            if any, are skipped.
    """

    core: SymbolTable
    blocks: dict[str, SymbolTable]
    freed: tuple[FreedSymbol, ...]
    lines: int
    bad_lines: int
    hidden: bool
    cut: bool


class _Fields(NamedTuple):
    addresses: list[bytes]
    types: bytes
    names: list[bytes]

    def part(self, start: int, end: int) -> _Fields:
        return _Fields(self.addresses[start:end], self.types[start:end], self.names[start:end])

    def plus(self, more: _Fields) -> _Fields:
        return _Fields(
            self.addresses + more.addresses, self.types + more.types, self.names + more.names
        )

    def where(self, chosen: Sequence[int]) -> _Fields:
        return _Fields(
            list(compress(self.addresses, chosen)),
            bytes(compress(self.types, chosen)),
            list(compress(self.names, chosen)),
        )

    def without_mapping_symbols(self) -> _Fields:
        """Returns the code symbols. A mapping symbol for data ends the preceding function."""
        chosen, types = bytearray(b"\1" * len(self.names)), bytearray(self.types)
        for index, name in enumerate(self.names):
            if is_mapping_symbol(name):
                chosen[index] = marks_data(name)
                types[index] = END_TYPE
        return _Fields(self.addresses, bytes(types), self.names).where(chosen)

    def split(self) -> tuple[_Fields, array[int]]:
        text = self.where(self.types.translate(_IS_TEXT))
        return text, parse_addresses(compress(self.addresses, self.types.translate(_IS_OTHER)))


class KallsymsParser:
    """Parses a kallsyms file in chunks; not thread-safe.

    If ``hidden`` is true after a chunk, no more chunks are required.
    """

    def __init__(self) -> None:
        self.hidden = False
        self.lines = 0
        self.bad_lines = 0
        self._has_preambles: bool | None = None
        self._rest = b""
        self._core = TableBuilder()
        self._last_core = b""
        self._blocks: dict[str, SymbolTable] = {}
        self._freed: list[FreedSymbol] = []
        self._module = b""
        self._open: _Fields | None = None
        self._others = array("Q")
        self._skipped = array("Q")  # end addresses of functions that precede skipped lines

    def feed(self, piece: bytes) -> None:
        """Parse the next bytes of the file."""
        text = self._rest + piece
        cut = _split_point(text)
        self._rest = text[cut:]
        if cut:
            self._parse(self._fold_preambles(text[:cut]))

    def finish(self) -> Kallsyms:
        """Returns the symbol tables. Call this once, after the last chunk."""
        cut = bool(self._rest) and not self.hidden
        if cut:
            cut = not self._rest.endswith(b"\n")
            whole = self._rest.rfind(b"\n") + 1
            if whole:
                self._parse(self._fold_preambles(self._rest[:whole]))
            if cut:
                self.lines += 1
                self._skip(self._rest[whole:])
                last = int(self._last_core or b"0", 16)
                if self._open is None and last in self._skipped:
                    self._end_after(last)  # the last symbol's end is unknown
                self._open = None
        self._close_block()
        core = self._core.finish()
        bad_lines = self.bad_lines + core.dropped
        blocks = self._blocks
        if self._skipped:
            core = core.with_ends(self._skipped, missing=True)
            blocks = {
                name: table.with_ends(self._skipped, missing=True) for name, table in blocks.items()
            }
        return Kallsyms(core, blocks, tuple(self._freed), self.lines, bad_lines, self.hidden, cut)

    def _fold_preambles(self, text: bytes) -> bytes:
        """Convert preambles to padding, which belongs to the function that follows it."""
        if self._has_preambles is False:
            return text
        if _PREAMBLE in text:
            self._has_preambles = True
            return PREAMBLE.sub(b" " + PAD_PREFIX, text)
        if self._has_preambles is None and text.count(_LOCAL) >= _MANY_FUNCTIONS:
            self._has_preambles = False  # searching the whole text is slow
        return text

    def _skip(self, line: bytes) -> None:
        """Count a malformed line, and end the preceding function at that line.

        Assume that a symbol without an address starts directly after the previous symbol's start.
        """
        self.bad_lines += 1
        first, *others = line.split(maxsplit=1) or [b""]
        whole = len(first) == _HEX_DIGITS and (others or line.endswith(b" "))
        address = _address(first) if whole else None
        if address is not None:
            self._skipped.append(int(address, 16))
        elif self._last_core and b"\t" not in line:
            self._end_after(int(self._last_core, 16))

    def _end_after(self, address: int) -> None:
        if address < _LAST_ADDRESS:
            self._skipped.append(address + 1)

    def _parse(self, text: bytes) -> None:
        tab = text.find(b"\t")
        start = len(text) if tab < 0 else text.rfind(b"\n", 0, tab) + 1
        if start:
            self._parse_core(text[:start] if tab >= 0 else text)
        if tab >= 0:
            self._parse_modules(text[start:])

    def _parse_core(self, text: bytes) -> None:
        fields = _columns(text.split(), _CORE_FIELDS)
        has_marks = b"$" in text
        if fields is not None:
            self.lines += len(fields.addresses)
            if self._is_hidden(fields):
                return
            last = fields.addresses[-1]
            if self._core.add(*(fields.without_mapping_symbols() if has_marks else fields)):
                self._last_core = last
                return
            self.lines -= len(fields.addresses)
        self._core.end_pad()
        fields = self._parse_slowly(text)
        if fields.addresses and not self._is_hidden(fields):
            self._last_core = fields.addresses[-1]
            self._core.add(*(fields.without_mapping_symbols() if has_marks else fields))

    def _is_hidden(self, fields: _Fields) -> bool:
        if self._last_core in {b"", _HIDDEN} and fields.addresses[-1] == _HIDDEN:
            self.hidden = self.hidden or 1 in fields.types.translate(_IS_TEXT)
        return self.hidden

    def _parse_slowly(self, text: bytes) -> _Fields:
        """Parse line by line, and skip lines that are malformed or out of order.

        A ``__pfx_`` symbol ends the preceding function, because the symbol's own function may have
        been skipped.
        """
        addresses, types, names = [], bytearray(), []
        for line in text.splitlines():
            tokens = line.split()
            if not tokens:
                continue
            self.lines += 1
            address = _address(tokens[0]) if len(tokens) == _CORE_FIELDS else None
            if address is None or len(tokens[1]) != 1 or address < self._last_core:
                self._skip(line)
                continue
            self._last_core = address
            addresses.append(address)
            types += b"-" if tokens[2].startswith(PAD_PREFIX) else tokens[1]
            names.append(tokens[2])
        return _Fields(addresses, bytes(types), names)

    def _parse_modules(self, text: bytes) -> None:
        tokens = text.split()
        fields = _columns(tokens, _MODULE_FIELDS)
        if fields is None:
            lines = text.splitlines(keepends=True)
            core = [line for line in lines if b"\t" not in line]
            if core:
                self._parse_core(b"".join(core))
            tokens = self._good_module_tokens([line for line in lines if b"\t" in line])
            fields = _columns(tokens, _MODULE_FIELDS)
            if fields is None:
                return
        else:
            self.lines += len(fields.addresses)
        if self.hidden:
            return
        has_marks = b"$" in text
        modules = tokens[3::_MODULE_FIELDS]
        changes = compress(range(1, len(modules)), map(ne, modules, islice(modules, 1, None)))
        start = 0
        for end in (*changes, len(modules)):
            part = fields.part(start, end)
            part, others = (part.without_mapping_symbols() if has_marks else part).split()
            if not (modules[start].startswith(b"[") and modules[start].endswith(b"]")):
                self.bad_lines += end - start
                self._skipped += parse_addresses(fields.addresses[start:end])
            elif self._open is not None and modules[start] == self._module:
                self._open = self._open.plus(part)
                self._others += others
            else:
                self._close_block(_block_name(modules[start]))
                self._module, self._open, self._others = modules[start], part, others
            start = end

    def _good_module_tokens(self, lines: list[bytes]) -> list[bytes]:
        good: list[bytes] = []
        self.lines += len(lines)
        for line in lines:
            tokens = line.split()
            address = _address(tokens[0]) if len(tokens) == _MODULE_FIELDS else None
            if address is None or len(tokens[1]) != 1:
                self._skip(line)
            else:
                good += (address, *tokens[1:])
        return good

    def _close_block(self, following: str = "") -> None:
        """Build a table from the open block; ``following`` is the next block's name."""
        if self._open is None:
            return
        fields, self._open = self._open, None
        name = _block_name(self._module)
        if name in self._blocks:  # a module has one block; later blocks are clones
            self._add_freed(fields, name)
            return
        is_module = name not in NO_MODULES
        if is_module and (not following or following in self._blocks or following in NO_MODULES):
            fields, clones = _split_clones(fields)
            self._add_freed(clones, name)
            self._others += parse_addresses(clones.addresses)
        if self._skipped:  # the function after the padding may have been skipped
            pads = [symbol.startswith(PAD_PREFIX) for symbol in fields.names]
            self._others += parse_addresses(fields.where(pads).addresses)
            fields = fields.where([not pad for pad in pads])
        builder = TableBuilder()
        for part in _sort_code(fields, self._others):
            builder.add(*part)
        limit = PAGE_BYTES if name in OUT_OF_LINE_BLOCKS else MAX_FUNCTION_BYTES
        self._blocks[name] = builder.finish(max_function=limit)

    def _add_freed(self, fields: _Fields, module: str) -> None:
        self._freed += [
            FreedSymbol(int(address, 16), name.decode("utf-8", "backslashreplace"), module)
            for address, name in zip(fields.addresses, fields.names, strict=True)
        ]


def parse_kallsyms(pieces: Iterable[bytes]) -> Kallsyms:
    """Parses a whole file, given in chunks of any size. Malformed content raises no exception."""
    parser = KallsymsParser()
    for piece in pieces:
        parser.feed(piece)
        if parser.hidden:
            break
    return parser.finish()


def _split_point(text: bytes) -> int:
    """Returns where to split the text so that all lines with the same address stay together."""
    end = text.rfind(b"\n") + 1
    start = end
    for _ in range(_MAX_ALIAS_LINES):
        start = text.rfind(b"\n", 0, max(start - 1, 0)) + 1
        if not start:
            return 0 if len(text) < _MAX_REST_BYTES else len(text)
        previous = text.rfind(b"\n", 0, start - 1) + 1
        if text[previous : previous + _HEX_DIGITS] != text[start : start + _HEX_DIGITS]:
            return start
    return end


def _columns(tokens: list[bytes], count: int) -> _Fields | None:
    """Returns the columns of lines with ``count`` fields; None if an address or type is invalid."""
    lines, surplus = divmod(len(tokens), count)
    addresses = tokens[0::count]
    types = b"".join(tokens[1::count])
    joined = b"\n".join(addresses)
    if surplus or not lines or len(types) != lines or len(joined) != 17 * lines - 1:
        return None
    if joined[16::17].count(b"\n") != lines - 1:  # addresses of different widths
        return None
    try:
        unhexlify(joined.translate(None, b"\n"))
    except ValueError:
        return None
    return _Fields(addresses, types, tokens[2::count])


def _address(token: bytes) -> bytes | None:
    """Returns an address as 16 lower-case hexadecimal digits; None if it is malformed."""
    if len(token) > _HEX_DIGITS:
        return None
    padded = token.rjust(_HEX_DIGITS, b"0").lower()
    try:
        unhexlify(padded)
    except ValueError:
        return None
    return padded


def _sort_code(text: _Fields, others: array[int]) -> Iterator[_Fields]:
    """Sorts a module's code symbols by address, and adds an end entry at each non-code symbol.

    Yields batches to limit memory use. A batch contains all symbols at each of its addresses.
    """
    if not text.addresses:
        return
    lowest, highest = int(min(text.addresses), 16), int(max(text.addresses), 16)
    ends = sorted(other for other in others if lowest < other <= highest)
    above = min((other for other in others if other > highest), default=None)
    ends += [] if above is None else [above]
    addresses = text.addresses + [b"%016x" % end for end in ends]
    types = text.types + bytes([END_TYPE]) * len(ends)
    names = text.names + [b""] * len(ends)
    order = sorted(range(len(addresses)), key=addresses.__getitem__)
    end = 0
    while end < len(order):
        start, end = end, min(end + _SORTED_LINES, len(order))
        while end < len(order) and addresses[order[end]] == addresses[order[end - 1]]:
            end += 1
        part = order[start:end]
        yield _Fields(
            [addresses[index] for index in part],
            bytes([types[index] for index in part]),
            [names[index] for index in part],
        )


def _split_clones(fields: _Fields) -> tuple[_Fields, _Fields]:
    """Separates the last module's symbols from the clones that ftrace lists after them.

    Trailing global symbols (``T``) outside the pages of the module's other code are assumed to be
    clones.
    """
    pages = [int(address, 16) // PAGE_BYTES for address in fields.addresses]
    code_lines = max(1, len(fields.types.rstrip(b"T")))
    first, last = min(pages[:code_lines], default=0), max(pages[:code_lines], default=0)
    live = [index < code_lines or first <= page <= last for index, page in enumerate(pages)]
    return fields.where(live), fields.where([not here for here in live])


def _block_name(brackets: bytes) -> str:
    return brackets.strip(b"[]").decode("utf-8", "backslashreplace")
