"""Loads modules, and reads their files as the ground truth for symbols."""

from __future__ import annotations

import ctypes
import io
import lzma
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

_FINIT_MODULE, _DELETE_MODULE = {"x86_64": (313, 176), "aarch64": (273, 106)}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """The half-open address range of a function, relative to its module's base."""

    start: int
    end: int


class KernelObject:
    """A kernel module's ``.ko`` or ``.ko.xz`` file."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self._elf = ELFFile(io.BytesIO(lzma.decompress(data) if path.suffix == ".xz" else data))

    @cached_property
    def build_id(self) -> str:
        for section in self._elf.iter_sections():
            if isinstance(section, NoteSection):
                for note in section.iter_notes():
                    if note["n_type"] == "NT_GNU_BUILD_ID":
                        return str(note["n_desc"])
        raise LookupError("no build id")

    @cached_property
    def functions(self) -> dict[str, list[Place]]:
        """The functions, keyed by name, with their addresses in the canonical layout.

        The layout depends only on the file: its executable sections, except init sections, are
        placed in header order, each with its alignment, starting at address 0.
        """
        executable = SH_FLAGS.SHF_ALLOC | SH_FLAGS.SHF_EXECINSTR
        bases: dict[int, int] = {}
        end = 0
        for index, section in enumerate(self._elf.iter_sections()):
            is_code = section["sh_flags"] & executable == executable
            if is_code and not section.name.startswith(".init"):
                align = max(section["sh_addralign"], 1)
                bases[index] = (end + align - 1) // align * align
                end = bases[index] + section["sh_size"]
        results: dict[str, list[Place]] = {}
        for table in self._elf.iter_sections():
            if isinstance(table, SymbolTableSection):
                for symbol in table.iter_symbols():
                    if symbol["st_info"]["type"] in ("STT_FUNC", "STT_NOTYPE"):
                        base = bases.get(symbol["st_shndx"])
                        if base is not None:
                            start = base + symbol["st_value"]
                            place = Place(start, start + symbol["st_size"])
                            results.setdefault(symbol.name, []).append(place)
        return results


def find_object(name: str) -> Path | None:
    """Finds a module's file for the running kernel, by the module's name in /proc/modules."""
    tree = Path("/lib/modules") / platform.release()
    for line in (tree / "modules.dep").read_text().splitlines():
        path = line.partition(":")[0]
        if path.rpartition("/")[2].partition(".")[0].replace("-", "_") == name:
            return tree / path
    return None


def loaded_objects() -> dict[str, tuple[int, KernelObject]]:
    """Returns the base (the address of ``.text``) and the file of each loaded module, by name."""
    results = {}
    for line in Path("/proc/modules").read_text().splitlines():
        name = line.split()[0]
        path = spin_object() if name == "kprof_spin" else find_object(name)
        text = Path(f"/sys/module/{name}/sections/.text")
        if path and text.exists():
            results[name] = int(text.read_text(), 16), KernelObject(path)
    return results


def spin_object(variant: str = "spin") -> Path:
    """Returns the test module's file. ``spin`` and ``other`` contain different functions."""
    return Path(os.environ["MATRIX_SPIN"]) / variant / "kprof_spin.ko"


def insert(variant: str = "spin", **parameters: int) -> None:
    """Loads the test module; raises ``OSError`` if its init function fails."""
    options = " ".join(f"{name}={value}" for name, value in parameters.items()).encode()
    with spin_object(variant).open("rb") as file:
        _call(_FINIT_MODULE, file.fileno(), options, 0)


def insert_command(variant: str = "spin", **parameters: int) -> list[str]:
    options = [f"{name}={value}" for name, value in parameters.items()]
    return ["insmod", str(spin_object(variant)), *options]


def remove(name: str = "kprof_spin") -> None:
    if Path(f"/sys/module/{name}/refcnt").exists():
        _call(_DELETE_MODULE, name.encode(), os.O_NONBLOCK)


def _call(number: int, *arguments: object) -> None:
    if _libc.syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextmanager
def spinning(variant: str = "spin", **parameters: int) -> Iterator[KernelObject]:
    insert(variant, **parameters)
    try:
        yield KernelObject(spin_object(variant))
    finally:
        remove()


class KernelSymbol(NamedTuple):
    address: int
    type: str
    name: str
    module: str


def read_module_symbols() -> list[KernelSymbol]:
    """Returns the module symbols in /proc/kallsyms, using a simple parser."""
    text = Path("/proc/kallsyms").read_text()
    # Module symbols follow the kernel's own symbols, and only module symbols contain a tab.
    start = text.rindex("\n", 0, text.index("\t"))
    results = []
    for line in text[start:].splitlines()[1:]:
        address, kind, name, module = line.split()
        results.append(KernelSymbol(int(address, 16), kind, name, module.strip("[]")))
    return results
