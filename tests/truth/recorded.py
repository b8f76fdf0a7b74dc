"""Stacks that the BPF program unwound on another machine, with their registers and memory."""

from __future__ import annotations

import base64
import io
import json
import lzma
import struct
from pathlib import Path
from typing import Any, NamedTuple

from tests.truth.native import NativeUnwinder
from tests.truth.reference import Dump, Maps, Memory
from tests.truth.tables import ElfTables


class RecordedStack(NamedTuple):
    """A stack recorded at an interrupt.

    Attributes:
        dump: a copy of the stack, and the registers, including the PC, by DWARF number.
        frames: all frames that the BPF program reported, leaf first.
        signal: whether a signal interrupted one of the frames.
    """

    dump: Dump
    frames: list[int]
    signal: bool

    def pt_regs(self) -> bytes:
        """Returns the registers as arm64's ``struct user_pt_regs``, in user mode."""
        return struct.pack("=34Q", *self.dump.registers, 0)


class RecordedMaps(Maps):
    """The mappings of a recorded process that ran a single program."""

    def __init__(self, maps: str, vdso: bytes, program: Path) -> None:
        self.pid = 0
        self._vdso = vdso
        self._program = program.read_bytes()
        self.mappings = list(self.parse(maps))
        self._starts = [mapping[0] for mapping in self.mappings]

    def content(self, mapping: Any) -> bytes:
        start, end, _, offset, name, _ = mapping
        if name == "[vdso]":
            return self._vdso
        return self._program[offset : offset + end - start]

    def code(self, address: int, size: int) -> bytes:
        mapping = self.find(address)
        return self.content(mapping)[address - mapping[0] :][:size] if mapping else b""

    def tables(self, mapping: Any) -> ElfTables | None:
        name = mapping[4]
        content = self._vdso if name == "[vdso]" else self._program
        return ElfTables(io.BytesIO(content)) if name else None


class Recorded(NamedTuple):
    """A recorded process: its mappings and stacks."""

    maps: RecordedMaps
    stacks: list[RecordedStack]

    def add_to(self, unwinder: NativeUnwinder, program: Path, vdso: Path) -> None:
        for inode, path in enumerate((vdso, program)):
            unwinder.add_table(path, inode)
        for mapping in self.maps.mappings:
            start, end, rights, offset, name, _ = mapping
            if "x" in rights:
                unwinder.add_mapping(start, end, offset, int(name != "[vdso]"))
                unwinder.add_memory(start, self.maps.content(mapping))


def read_recorded(path: Path, name: str, program: Path, vdso: Path) -> Recorded:
    """Reads the recorded process ``name`` from a file, and writes its vDSO to ``vdso``."""
    process = json.loads(lzma.decompress(path.read_bytes()))[name]
    content = base64.b64decode(process["vdso"])
    vdso.write_bytes(content)
    maps = RecordedMaps(process["maps"], content, program)
    return Recorded(maps, list(map(_stack, process["stacks"])))


def _stack(one: dict[str, Any]) -> RecordedStack:
    dump = Dump(one["registers"], [Memory(one["base"], base64.b64decode(one["memory"]))])
    return RecordedStack(dump, one["frames"], one["signal"])
