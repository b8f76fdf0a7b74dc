"""The dictionary of one request: every value once, nothing unused, exact size at all times."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from typing import Any, Final

from otel_kprofiler.model import (
    STACK_NOT_COLLECTED,
    STACK_OK,
    STACK_TRUNCATED,
    Attributes,
    AttributeValue,
    Frame,
    FrameKind,
    Line,
    Module,
    ModuleKind,
    SpanLink,
    Stack,
    StackStatus,
    Unresolved,
    WindowSample,
)
from otel_kprofiler.otlp.conventions import (
    BPF_PROGRAM,
    BUILD_ID_GNU,
    BUILD_ID_HTLHASH,
    CPU,
    FRAME_TYPE,
    FRAME_TYPE_KERNEL,
    FRAME_TYPE_NATIVE,
    KERNEL_STACK_STATUS,
    MODULE_BUILTIN,
    MODULE_KIND,
    THREAD_ID,
    THREAD_NAME,
    UNRESOLVED,
    USER_STACK_STATUS,
)
from otel_kprofiler.otlp.writer import (
    ATTRIBUTE,
    FUNCTION,
    LINK,
    LOCATION,
    MAPPING,
    STACK,
    STRING,
    KeyValue,
    Token,
    Writer,
    clean,
)

_SILENT: Final = frozenset({STACK_OK, STACK_NOT_COLLECTED})
"""Outcomes that miss nothing, so nothing is said."""


def status_text(status: StackStatus) -> str:
    """How a stack's outcome is written: ``truncated`` or the name (else number) of an errno."""
    if status == STACK_TRUNCATED:
        return "truncated"
    return errno.errorcode.get(-status, str(status))


class Dictionary:
    """Interns values into the seven tables and writes each entry as it is first seen.

    Frames and stacks are looked up by identity first, so they must stay alive as long as the
    dictionary. Not thread-safe.

    Attributes:
        size: bytes of the dictionary's body, zero entries included.
        tables: entries of each table, without the zero entry, ready to be joined.
    """

    def __init__(self, writer: Writer, *, keys_by_reference: bool) -> None:
        self._writer = writer
        self._by_reference = keys_by_reference
        self.size = writer.table_overhead()
        self.tables: tuple[list[bytes], ...] = tuple([] for _ in range(7))
        self._strings: dict[str, Token] = {"": b""}
        self._entries: tuple[dict[Any, Token], ...] = tuple({} for _ in range(7))
        self._frames: dict[int, Token] = {}
        self._user_addresses: dict[int, Token] = {}
        self._stacks: dict[int, Token] = {}
        self._shortcuts: dict[tuple[object, ...], bytes] = {}
        self._journal: list[tuple[dict[Any, Token], Any, list[bytes] | None]] = []

    def begin(self) -> None:
        """From here on, :meth:`rollback` undoes what was interned."""
        self._journal.clear()

    def rollback(self) -> None:
        """Forget everything that was interned since :meth:`begin`."""
        while self._journal:
            known, key, table = self._journal.pop()
            del known[key]
            if table is not None:
                self.size -= len(table.pop())

    def _remember(self, known: dict[Any, Token], key: Any, token: Token) -> Token:
        """Put a short cut into ``known``; nothing is written."""
        known[key] = token
        self._journal.append((known, key, None))
        return token

    def _add(self, known: dict[Any, Token], key: Any, index: int, entry: bytes) -> Token:
        table = self.tables[index]
        table.append(entry)
        self.size += len(entry)
        self._journal.append((known, key, table))
        token = known[key] = self._writer.token(len(table))
        return token

    def _intern(self, index: int, entry: bytes) -> Token:
        """An entry whose bytes name it completely, as all that it refers to is interned."""
        known = self._entries[index]
        return known.get(entry) or self._add(known, entry, index, entry)

    def string(self, text: str) -> Token:
        """Token of a string; the empty string is index 0."""
        token = self._strings.get(text)
        if token is None:
            cleaned = clean(text)
            if cleaned != text:
                return self._remember(self._strings, text, self.string(cleaned))
            token = self._add(self._strings, text, STRING, self._writer.string(text))
        return token

    def attribute(self, key: str, value: AttributeValue) -> Token:
        """Token of an attribute without unit."""
        return self._intern(ATTRIBUTE, self._writer.attribute(self.string(key), value))

    def link(self, link: SpanLink | None) -> Token:
        """Token of a link; no link is index 0."""
        return b"" if link is None else self._intern(LINK, self._writer.link(link))

    def key_values(self, attributes: Attributes) -> tuple[bytes, ...]:
        """Attributes of a resource or scope, sorted by key so that equal ones give equal bytes."""
        return tuple([self._key_value(key, attributes[key]) for key in sorted(attributes)])

    def _key_value(self, key: str, value: AttributeValue) -> bytes:
        if not self._by_reference:
            return self._writer.key_value(KeyValue(key, value))
        if not isinstance(value, str):
            return self._writer.key_value(KeyValue(key, value, self.string(key)))
        known = self._shortcuts.get((key, value))  # most texts are the same in all resources
        if known is not None:
            return known
        written = KeyValue(key, value, self.string(key), self.string(value))
        return self._remember(self._shortcuts, (key, value), self._writer.key_value(written))

    def thread(self, sample: WindowSample) -> bytes:
        """Joined tokens of a sample's attributes."""
        stack = sample.stack
        key = (
            sample.tid, sample.thread_name, sample.cpu, stack.kernel_status, stack.user_status
        )  # fmt: skip
        known = self._shortcuts.get(key)
        if known is not None:
            return known
        attributes: dict[str, AttributeValue] = {
            THREAD_NAME: sample.thread_name,
            THREAD_ID: sample.tid,
            CPU: sample.cpu,
        }
        if stack.kernel_status not in _SILENT:
            attributes[KERNEL_STACK_STATUS] = status_text(stack.kernel_status)
        if stack.user_status not in _SILENT:
            attributes[USER_STACK_STATUS] = status_text(stack.user_status)
        return self._remember(self._shortcuts, key, self.attributes(attributes))

    def attributes(self, attributes: Mapping[str, AttributeValue]) -> bytes:
        """Joined tokens of attributes, in their order."""
        return self._join(self.attribute(key, value) for key, value in attributes.items())

    def _join(self, tokens: Iterable[Token]) -> bytes:
        return self._writer.separator.join(tokens)

    def stack(self, stack: Stack) -> Token:
        """Token of a stack; a stack without frames is index 0."""
        token = self._stacks.get(id(stack))
        if token is None:
            frames, addresses = self._frames, self._user_addresses
            tokens = [frames.get(id(frame)) or self._add_frame(frame) for frame in stack.leading]
            tokens += [
                addresses.get(address) or self._add_user_address(address)
                for address in stack.user_addresses
            ]
            locations = self._join(tokens)
            token = self._intern(STACK, self._writer.stack(locations)) if locations else b""
            self._remember(self._stacks, id(stack), token)
        return token

    def frame(self, frame: Frame) -> Token:
        """Token of a frame's location."""
        return self._frames.get(id(frame)) or self._add_frame(frame)

    def user_address(self, address: int) -> Token:
        """Token of the location of a raw address of a process."""
        return self._user_addresses.get(address) or self._add_user_address(address)

    def _add_user_address(self, address: int) -> Token:
        location = self._writer.location(b"", address, (), self._frame_attributes(user=True))
        return self._remember(self._user_addresses, address, self._intern(LOCATION, location))

    def _add_frame(self, frame: Frame) -> Token:
        module, address, lines = frame.module, frame.address, frame.lines
        location = self._writer.location(
            self._mapping(module, address) if module else b"",
            address,
            [(self._function(line), line.line) for line in lines if any(line[:3])],
            self._frame_attributes(
                frame.unresolved, frame.builtin, user=frame.kind is FrameKind.USER
            ),
        )
        return self._remember(self._frames, id(frame), self._intern(LOCATION, location))

    def _frame_attributes(
        self,
        unresolved: Unresolved | None = None,
        builtin: tuple[str, ...] = (),
        *,
        user: bool,
    ) -> bytes:
        key = (user, unresolved, builtin)
        known = self._shortcuts.get(key)
        if known is not None:
            return known
        attributes: dict[str, AttributeValue] = {
            FRAME_TYPE: FRAME_TYPE_NATIVE if user else FRAME_TYPE_KERNEL
        }
        if builtin:
            attributes[MODULE_BUILTIN] = builtin if len(builtin) > 1 else builtin[0]
        if unresolved not in (None, Unresolved.USER_ADDRESS):
            attributes[UNRESOLVED] = unresolved.name.lower()
        return self._remember(self._shortcuts, key, self.attributes(attributes))

    def _mapping(self, module: Module, address: int) -> Token:
        """Token of a module; its extent is stated only for addresses that lie in it."""
        limit = module.ranges[-1].end - module.base if module.ranges else 0
        inside = 0 <= address < limit
        key = (id(module), inside)
        known = self._shortcuts.get(key)
        if known is not None:
            return known
        attributes: dict[str, AttributeValue] = {BUILD_ID_HTLHASH: module.file_id}
        if module.build_id:
            attributes[BUILD_ID_GNU] = module.build_id
        if module.kind in (ModuleKind.BPF, ModuleKind.OUT_OF_LINE):
            attributes[MODULE_KIND] = module.kind.value
        if module.program is not None:
            fields: tuple[str | int, ...] = module.program
            given = zip(BPF_PROGRAM, fields, strict=True)
            attributes |= {key: value for key, value in given if value}
        entry = self._writer.mapping(
            limit if inside else 0, self.string(module.name), self.attributes(attributes)
        )
        return self._remember(self._shortcuts, key, self._intern(MAPPING, entry))

    def _function(self, line: Line) -> Token:
        known = self._shortcuts.get(line[:3])
        if known is not None:
            return known
        entry = self._writer.function(*map(self.string, line[:3]))
        return self._remember(self._shortcuts, line[:3], self._intern(FUNCTION, entry))
