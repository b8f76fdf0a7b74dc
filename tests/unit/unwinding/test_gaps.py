"""Gaps are the ranges of code without unwind rules."""

import struct
from io import BytesIO

import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import ImageSource, read_elf
from otel_kprofiler.unwinding.gaps import find_gaps, find_starts
from otel_kprofiler.unwinding.table import find_tables
from tests.unit.unwinding.files import content


def find(name, *, with_tables=True, entry=0):
    """Returns the gaps in a file with entry point ``entry``, and the file's text segment."""
    source = ImageSource(content(name))
    elf = read_elf(source, "x86_64")._replace(entry=entry)
    (text,) = elf.texts
    return find_gaps(source, elf, find_tables(source, elf) if with_tables else None), text


def test_gaps_are_the_code_outside_functions_with_unwind_rules():
    gaps, text = find("personality.so", entry=1)
    functions = [
        (entry["initial_location"], entry["initial_location"] + entry["address_range"])
        for entry in ELFFile(BytesIO(content("personality.so"))).get_dwarf_info().EH_CFI_entries()
        if isinstance(entry, FDE)
    ]
    first, last = min(functions)[0], max(functions)[1]
    assert gaps == [(text.address, first), (last, text.address + text.size)]


def test_all_code_is_a_gap_in_a_file_without_unwind_tables():
    gaps, text = find("personality.so", with_tables=False)
    assert gaps == [(text.address, text.address + text.size)]


@pytest.mark.parametrize("entry", [0, 1100], ids=["library", "program"])
def test_gaps_in_unwind_coverage_are_ignored_if_the_entry_point_has_a_rule(entry):
    assert find("personality.so", entry=entry)[0] == []


@pytest.mark.parametrize("is_fixed", [False, True], ids=["relative", "absolute"])
def test_a_main_function_without_unwind_tables_is_found_via_the_entry_point(monkeypatch, is_fixed):
    entry, (gaps, text) = 1100, find("personality.so", entry=1)
    main = gaps[-1][0] + 20
    code = b"\x48\xc7\xc7" + struct.pack("<i", main)
    if not is_fixed:
        code = b"\x48\x8d\x3d" + struct.pack("<i", main - entry - 7)
    data = bytearray(content("personality.so"))
    at = text.offset + entry - text.address
    data[at : at + len(code)] = code
    source = ImageSource(bytes(data))
    elf = read_elf(source, "x86_64")._replace(entry=entry)
    assert find_starts(source, elf) == [entry, main]
    every = find_gaps(source, elf, find_tables(source, elf))
    assert every[-1] == gaps[-1]
    assert sum(end - start for start, end in every) >= sum(end - start for start, end in gaps)
    monkeypatch.setattr("otel_kprofiler.unwinding.gaps._MAX_SIZES", 0)
    assert find_gaps(source, elf, find_tables(source, elf)) == gaps


def test_gaps_that_contain_only_linker_generated_code_are_ignored():
    assert find("plain.so")[0] == []
