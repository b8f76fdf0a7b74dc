"""Reads ELF files: their bytes, headers, notes and identity.

The files are untrusted: anything malformed raises :class:`ElfError`.
"""

from otel_kprofiler.elf import frame_index
from otel_kprofiler.elf.content import read_content, unpacked_size
from otel_kprofiler.elf.frame_index import make_pairs, parse_cie
from otel_kprofiler.elf.headers import (
    MACHINES,
    SHF_COMPRESSED,
    SHT_NOBITS,
    ElfFile,
    Section,
    find_address,
    find_offset,
    find_section,
    read_debug_elf,
    read_dynamic_linker,
    read_elf,
    read_load_addresses,
    read_sections,
)
from otel_kprofiler.elf.identity import hash_file
from otel_kprofiler.elf.loaded import (
    LoadedElf,
    Read,
    ThreadStorage,
    find_relocations,
    find_thread_variable,
    read_loaded,
)
from otel_kprofiler.elf.names import MAPPING_SYMBOL, cut_versions, is_mapping_symbol, marks_data
from otel_kprofiler.elf.notes import find_build_id
from otel_kprofiler.elf.problem import ElfError, ElfProblem
from otel_kprofiler.elf.source import FileSource, ImageSource, Source
from otel_kprofiler.elf.symbols import ElfSymbol, find_symbols

__all__ = [
    "MACHINES",
    "MAPPING_SYMBOL",
    "SHF_COMPRESSED",
    "SHT_NOBITS",
    "ElfError",
    "ElfFile",
    "ElfProblem",
    "ElfSymbol",
    "FileSource",
    "ImageSource",
    "LoadedElf",
    "Read",
    "Section",
    "Source",
    "ThreadStorage",
    "cut_versions",
    "find_address",
    "find_build_id",
    "find_offset",
    "find_relocations",
    "find_section",
    "find_symbols",
    "find_thread_variable",
    "frame_index",
    "hash_file",
    "is_mapping_symbol",
    "make_pairs",
    "marks_data",
    "parse_cie",
    "read_content",
    "read_debug_elf",
    "read_dynamic_linker",
    "read_elf",
    "read_load_addresses",
    "read_loaded",
    "read_sections",
    "unpacked_size",
]
