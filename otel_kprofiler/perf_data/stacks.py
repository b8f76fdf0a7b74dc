"""Resolves each sample's call chain using the mappings that existed at its timestamp."""

import os
import struct
from collections.abc import Iterator
from os.path import basename
from typing import Final

from otel_kprofiler.model import (
    KERNEL_SIDE,
    USER_SIDE,
    AddressRange,
    BuildId,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    RangeSource,
    SideKind,
    Stack,
    Unresolved,
)
from otel_kprofiler.perf_data.naming import Names
from otel_kprofiler.perf_data.processes import AddressSpace, Process
from otel_kprofiler.perf_data.records import KERNEL_MODE, FileMapping, Ksymbol
from otel_kprofiler.text import decode_name

_CONTEXT: Final = (1 << 64) - 4095
"""``PERF_CONTEXT_MAX``: callchain entries at or above it are ``PERF_CONTEXT_*`` markers."""
_SIDES: Final = {
    (1 << 64) - 32: KERNEL_SIDE,  # PERF_CONTEXT_HV
    (1 << 64) - 128: KERNEL_SIDE,  # PERF_CONTEXT_KERNEL
    (1 << 64) - 512: USER_SIDE,  # PERF_CONTEXT_USER
}
"""The type (kernel or user) of the addresses after each marker. Addresses after other markers
belong to guests, and are omitted.
"""
_KERNEL_IMAGE: Final = b"[kernel.kallsyms]"
_VMLINUX: Final = "vmlinux"
_NO_FILE: Final = (b"//anon", b"[heap]", b"[stack", b"/dev/zero", b"/anon_hugepage", b"[anon")
_VDSO: Final = b"[vdso]"


class Stacks:
    """Resolves callchains to stacks. ``build_ids`` maps paths to build ids."""

    def __init__(self, build_ids: dict[bytes, str], names: Names) -> None:
        self._build_ids = build_ids
        self._names = names
        self._kernel = AddressSpace()
        self._loaded: dict[FileMapping, Module] = {}
        self._bpf: dict[int, str] = {}
        self._frames: dict[tuple[FileMapping, int], Frame] = {}

    def map_kernel(self, mapping: FileMapping) -> None:
        """Adds the mapping of the kernel or a module."""
        if mapping.path.startswith(_KERNEL_IMAGE):
            # perf appends the symbol _text to the path, and stores its address as the offset.
            base = mapping.offset or mapping.start
            mapping = mapping._replace(offset=0, start=min(base, mapping.start))
        self._kernel.add(mapping)

    def load(self, symbol: Ksymbol) -> None:
        """Adds named kernel code, such as a BPF program."""
        name = symbol.name
        self._kernel.add(FileMapping(symbol.time_ns, -1, symbol.start, symbol.end, 0, name, ""))
        self._bpf[symbol.start] = decode_name(name)

    def resolve(self, process: Process, chain: bytes, mode: int) -> Stack:
        """Returns a callchain's stack; the same object for equal callchains in a process."""
        stack = process.stacks.get((mode, chain))
        if stack is None:
            frames = list(self._chain(process, chain, mode))
            stack = process.stacks[mode, chain] = Stack.from_frames(frames)
        return stack

    def _chain(self, process: Process, chain: bytes, mode: int) -> Iterator[Frame]:
        side: SideKind | None = KERNEL_SIDE if mode == KERNEL_MODE else USER_SIDE
        is_leaf = True
        for (word,) in struct.iter_unpack("<Q", chain):
            if word >= _CONTEXT:
                side, is_leaf = _SIDES.get(word), True
                continue
            if word == 0:  # the end of a chain of frame pointers
                continue
            if side is KERNEL_SIDE:
                yield self._kernel_frame(word - (not is_leaf))
            elif side is USER_SIDE:
                yield self._user_frame(process, word - (not is_leaf))
            is_leaf = False

    def _kernel_frame(self, address: int) -> Frame:
        mapping = self._kernel.find(address)
        if mapping is None:
            return Frame(None, address, (), 0, KERNEL_SIDE, Unresolved.UNMAPPED)
        rva = address - mapping.start
        frame = self._frames.get((mapping, rva))
        if frame is None:
            frame = self._make_kernel_frame(mapping, rva, address)
            self._frames[mapping, rva] = frame
        return frame

    def _make_kernel_frame(self, mapping: FileMapping, rva: int, address: int) -> Frame:
        module = self._loaded.get(mapping)
        if module is None:
            module = self._loaded[mapping] = self._module(mapping)
        if name := self._bpf.get(mapping.start):
            return Frame(module, rva, (Line(name),), rva, KERNEL_SIDE)
        frame = self._names.find_kernel(module, rva, address)
        return frame or Frame(module, rva, (), 0, KERNEL_SIDE, Unresolved.NOT_HERE)

    def _module(self, mapping: FileMapping) -> Module:
        extent = AddressRange(mapping.start, mapping.end, "")
        path = mapping.path
        if name := self._bpf.get(mapping.start):
            kind = ModuleKind.BPF
        elif path.startswith(_KERNEL_IMAGE):
            name, kind, path = _VMLINUX, ModuleKind.VMLINUX, _KERNEL_IMAGE
        else:
            name, kind = _module_name(path), ModuleKind.LOADED
        build_id = self._build_id(mapping, path)
        return Module(
            name, kind, build_id, FileId(""), mapping.start, (extent,), RangeSource.KERNEL
        )

    def _user_frame(self, process: Process, address: int) -> Frame:
        mapping = process.find(address)
        if mapping is None:
            return Frame(None, address, (), 0, USER_SIDE, Unresolved.UNMAPPED)
        if mapping.path.startswith(_NO_FILE):
            return Frame(None, address, (), 0, USER_SIDE, Unresolved.NO_FILE)
        offset = address - mapping.start + mapping.offset
        if mapping.path == _VDSO:
            offset = address - mapping.start
        key = mapping._replace(time_ns=0, pid=0, start=0, end=0, offset=0), offset
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._make_user_frame(mapping, offset)
        return frame

    def _make_user_frame(self, mapping: FileMapping, offset: int) -> Frame:
        build_id = self._build_id(mapping, mapping.path)
        path = decode_name(mapping.path)
        frame = self._names.find_user(os.fsdecode(mapping.path), build_id or "", offset)
        if frame is not None:
            return frame
        module = self._loaded.get(mapping)
        if module is None:
            module = Module(basename(path), ModuleKind.USER, build_id, FileId(""), 0)
            self._loaded[mapping] = module
        return Frame(module, offset, (), 0, USER_SIDE, Unresolved.NOT_HERE)

    def _build_id(self, mapping: FileMapping, path: bytes) -> BuildId | None:
        build_id = mapping.build_id or self._build_ids.get(path)
        return BuildId(build_id) if build_id else None


def _module_name(path: bytes) -> str:
    """Returns the name of a module given as ``[ext4]`` or as a path such as ``…/ext4.ko.xz``."""
    name = decode_name(path).strip("[]").rpartition("/")[2].partition(".ko")[0]
    return name.replace("-", "_")
