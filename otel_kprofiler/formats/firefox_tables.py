"""Builds the shared tables of a Firefox Profiler profile: strings, code, stacks.

The columns follow ``src/types/profile.ts`` in github.com/firefox-devtools/profiler.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from otel_kprofiler.formats.columns import index_of
from otel_kprofiler.formats.entries import Entry, frame_entries, side_remarks
from otel_kprofiler.model import KERNEL_SIDE, PYTHON_SIDE, USER_SIDE, Frame, Module, SideKind, Stack
from otel_kprofiler.text import escape_surrogates

_LIBRARY: Final = 1  # ResourceType
_NONE: Final = -1
_COLORS: Final = {KERNEL_SIDE: "orange", USER_SIDE: "yellow", PYTHON_SIDE: "blue"}
_OTHER_SIDE: Final = "green"
_GUID_HEX: Final = 32
_HEX: Final = re.compile("[0-9a-fA-F]+")


class _FrameKey(NamedTuple):
    entry: Entry
    module: Module | None
    address: int
    offset: int
    inline_depth: int


class SharedTables:
    """Builds the tables that all threads share. Equal rows are merged."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._categories: dict[SideKind | None, int] = {None: 0}
        self._modules: dict[Module, int] = {}
        self._sources: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._symbols: dict[tuple[int, int, str], int] = {}
        self._funcs: dict[tuple[str, str, str], int] = {}
        self._frames: dict[_FrameKey, int] = {}
        self._nodes: dict[tuple[int | None, int], int] = {}
        self._stacks: dict[Stack, int | None] = {}
        self._reasons: dict[Stack, set[str]] = {}

    def string(self, text: str) -> int:
        """Returns the index of a string."""
        return index_of(self._strings, escape_surrogates(text))

    def stack(self, stack: Stack) -> int | None:
        """Returns the index of a stack; None if it has no frames."""
        if stack not in self._stacks:
            node = None
            reasons = set()
            for key in _keys(stack):
                self._symbol(key)
                frame = index_of(self._frames, key)
                node = index_of(self._nodes, (node, frame))
                reasons.add(key.entry.reason)
            self._stacks[stack] = node
            self._reasons[stack] = reasons - {""}
        return self._stacks[stack]

    def reasons(self, stack: Stack) -> set[str]:
        """Returns the reasons why a stack lacks frames or names."""
        self.stack(stack)
        return self._reasons[stack]

    def _symbol(self, key: _FrameKey) -> int | None:
        """Returns the index of a function's native symbol; None if its start address is unknown."""
        entry, module, address, offset, depth = key
        if module is None or depth or entry.reason or not offset:
            return None
        lib = index_of(self._modules, module)
        return index_of(self._symbols, (lib, address - offset, escape_surrogates(entry.name)))

    def categories(self) -> list[dict[str, Any]]:
        """Returns the frame categories: kernel, user, Python, and a default category."""
        return [
            {
                "name": (side.name if side else "other").capitalize(),
                "color": _COLORS.get(side, _OTHER_SIDE) if side else "grey",
                "subcategories": ["Other"],
            }
            for side in self._categories
        ]

    def libs(self) -> list[dict[str, Any]]:
        """Returns the modules of all frames, with build ids."""
        return [_lib(module) for module in self._modules]

    def as_json(self) -> dict[str, Any]:
        """Returns the tables in the form of ``profile.shared``."""
        frames = [self._frame(key) for key in self._frames]
        funcs = [self._func(*key) for key in self._funcs]
        stacks = [
            (frame, 0 if parent is None else at - parent)
            for at, (parent, frame) in enumerate(self._nodes)
        ]
        symbols = [(*key[:2], self.string(key[2]), None) for key in self._symbols]
        sources = [(None, self.string(file), 1, 1, None, None) for file in self._sources]
        resources = [(self.string(name), None, _LIBRARY) for name in self._resources]
        return {
            "stackTable": columns(stacks, "frame", "prefixOffset"),
            "frameTable": columns(
                frames, "address", "lib", "inlineDepth", "category", "subcategory", "func",
                "nativeSymbol", "innerWindowID", "line", "column", "originalLocation",
            ),
            "funcTable": columns(
                funcs, "name", "isJS", "relevantForJS", "resource", "source", "lineNumber",
                "columnNumber", "originalLocation",
            ),
            "resourceTable": columns(resources, "name", "host", "type"),
            "nativeSymbols": columns(symbols, "libIndex", "address", "name", "functionSize"),
            "sources": columns(
                sources, "id", "filename", "startLine", "startColumn", "sourceMapURL", "content"
            ),
            "sourceLocationTable": columns([], "source", "line", "column"),
            "stringArray": list(self._strings),
        }  # fmt: skip

    def _frame(self, key: _FrameKey) -> tuple[int | None, ...]:
        entry, module, address, _, depth = key
        lib = _NONE if module is None else index_of(self._modules, module)
        category = index_of(self._categories, entry.side)
        func = index_of(self._funcs, (entry.label, entry.module, entry.file))
        line = entry.line or None
        return (
            _NONE if module is None else address, lib, depth, category, 0, func,
            self._symbol(key), 0, line, None, None,
        )  # fmt: skip

    def _func(self, name: str, module: str, file: str) -> tuple[Any, ...]:
        resource = index_of(self._resources, module) if module else _NONE
        source = index_of(self._sources, file) if file else None
        return (self.string(name), False, False, resource, source, None, None, None)


def columns(rows: Iterable[tuple[Any, ...]], *names: str) -> dict[str, Any]:
    """Returns a table in the Firefox format: a list for each column, and the length."""
    rows = list(rows)
    table: dict[str, Any] = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    return table | {"length": len(rows)}


def _keys(stack: Stack) -> Iterable[_FrameKey]:
    for side in reversed(stack.sides):
        for remark in side_remarks(side):
            yield _FrameKey(remark, None, 0, 0, 0)
        for frame in reversed(side.frames):
            yield from _frame_keys(frame)


def _frame_keys(frame: Frame) -> Iterable[_FrameKey]:
    for depth, entry in enumerate(frame_entries(frame)):
        yield _FrameKey(entry, frame.module, frame.address, frame.offset, depth)


def _lib(module: Module) -> dict[str, Any]:
    name = escape_surrogates(module.name)
    return {
        "arch": "",
        "name": name,
        "path": name,
        "debugName": name,
        "debugPath": name,
        "breakpadId": _breakpad_id(module.build_id or ""),
        "codeId": module.build_id,
    }


def _breakpad_id(build_id: str) -> str:
    """Returns the id for symbol servers (a GUID and an age); empty if ``build_id`` is not hex."""
    if not _HEX.fullmatch(build_id):
        return ""
    raw = bytes.fromhex(build_id[:_GUID_HEX].ljust(_GUID_HEX, "0"))
    return (raw[3::-1] + raw[5:3:-1] + raw[7:5:-1] + raw[8:]).hex().upper() + "0"
