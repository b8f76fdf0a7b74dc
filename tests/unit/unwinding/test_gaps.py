"""Ranges of code without unwind rules."""

from io import BytesIO

import pytest
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile

from otel_kprofiler.elf import ImageSource, read_elf
from otel_kprofiler.unwinding.gaps import find_gaps
from otel_kprofiler.unwinding.table import find_tables
from tests.unit.unwinding.files import content


def find(name, *, with_tables=True, entry=0):
    """Returns the gaps of a file, as if it had this entry point and this text alone."""
    source = ImageSource(content(name))
    elf = read_elf(source, "x86_64")._replace(entry=entry)
    (text,) = elf.texts
    return find_gaps(source, elf, find_tables(source, elf) if with_tables else None), text


def test_gaps_are_the_code_around_functions_with_rules():
    gaps, text = find("personality.so", entry=1)
    dwarf = ELFFile(BytesIO(content("personality.so"))).get_dwarf_info()
    functions = [
        (entry["initial_location"], entry["initial_location"] + entry["address_range"])
        for entry in dwarf.EH_CFI_entries()
        if isinstance(entry, FDE)
    ]
    first, last = min(functions)[0], max(functions)[1]
    assert gaps == [(text.address, first), (last, text.address + text.size)]


def test_all_code_of_a_file_without_tables_is_a_gap():
    gaps, text = find("personality.so", with_tables=False)
    assert gaps == [(text.address, text.address + text.size)]


@pytest.mark.parametrize("entry", [0, 1100], ids=["library", "program"])
def test_gaps_are_not_worth_a_wait_unless_the_entry_point_is_in_one(entry):
    assert find("personality.so", entry=entry)[0] == []


def test_the_code_that_linkers_leave_without_rules_is_not_worth_a_process():
    assert find("plain.so")[0] == []
