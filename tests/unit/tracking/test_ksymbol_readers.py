"""Loaded BPF programs are read with the best method that the kernel permits."""

import os
import re

import pytest

from otel_kprofiler.bpf.btf import ProgramBtf
from otel_kprofiler.errors import SamplerError
from otel_kprofiler.model import Ksymbol, KsymbolAction, Level, ModuleKind
from otel_kprofiler.tracking import ksymbol_readers
from otel_kprofiler.tracking.ksymbol_readers import BaselineReader, ReadMethod, find_ksymbol_method
from otel_kprofiler.tracking.programs import HiddenAddressesError, ProgramFacts, ProgramReader
from tests.raising import raising

STATUS = b"CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"
LINES = (
    b"ffffffff81000000 T _text\n"
    b"ffffffffc0000000 t ftrace_trampoline\t[__builtin__ftrace]\n"
    b"ffffffffc0001000 t bpf_prog_1_a\t[bpf]\n"
    b"ffffffffc0002000 t bpf_trampoline_5\t[bpf]\n"
)
PROGRAM = Ksymbol(0xFFFFFFFFC0001000, 33, "bpf_prog_1_a", ModuleKind.BPF, 9, 2)


class Files:
    def __init__(self, tmp_path, lines=LINES):
        (tmp_path / "kallsyms").write_bytes(lines)
        self.path = tmp_path / "kallsyms"

    def open_fd(self, path):
        return os.open(self.path, os.O_RDONLY)

    def read_bytes(self, path):
        return STATUS


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Returns a function to create hosts on which given methods of reading BPF programs fail."""

    def make(walk=None, iterator=None, lines=LINES):
        def given(*_):
            return [PROGRAM]

        monkeypatch.setattr(ProgramReader, "read", raising(walk) if walk else given)
        monkeypatch.setattr(
            ksymbol_readers, "read_programs", raising(iterator) if iterator else given
        )
        return Files(tmp_path, lines)

    return make


@pytest.mark.parametrize(
    ("walk", "iterator", "method"),
    [
        (None, None, ReadMethod.WALK),
        (PermissionError(1, "no"), None, ReadMethod.ITERATOR),
        (HiddenAddressesError(1, "hidden"), None, ReadMethod.ITERATOR),
        (PermissionError(1, "no"), SamplerError("no BTF"), ReadMethod.KALLSYMS),
        (PermissionError(1, "no"), ValueError("rows"), ReadMethod.KALLSYMS),
    ],
)
def test_the_best_permitted_method_of_reading_bpf_programs_is_used(host, walk, iterator, method):
    files = host(walk, iterator)
    reader = BaselineReader(files)
    reading = reader.read_programs()
    assert reader.method is method
    if method is ReadMethod.KALLSYMS:
        assert reading is None
    else:
        assert reading == (KsymbolAction.PROGRAMS_READ, (PROGRAM,))
    assert reader.kallsyms_reads == 0
    finding = find_ksymbol_method(files)
    assert finding.level is (Level.OK if method is ReadMethod.WALK else Level.INFO)
    assert method.value in finding.observed


def test_a_full_read_returns_bpf_programs_with_their_lengths_and_trampolines(host):
    reader = BaselineReader(host())
    action, symbols = reader.read_all(lambda: True)
    assert action is KsymbolAction.ALL_READ
    assert symbols[0] == PROGRAM
    assert [s.name for s in symbols[1:]] == ["ftrace_trampoline", "bpf_trampoline_5"]
    assert reader.kallsyms_reads == 1


def test_kallsyms_alone_yields_all_symbols_without_lengths(host):
    reader = BaselineReader(host(PermissionError(), PermissionError()))
    assert [(s.name, s.length) for s in reader.read_all(lambda: True).symbols] == [
        ("ftrace_trampoline", 0), ("bpf_prog_1_a", 0), ("bpf_trampoline_5", 0)
    ]  # fmt: skip


@pytest.mark.parametrize("lines", [LINES, re.sub(rb"[0-9a-f]{16}", b"0" * 16, LINES)])
def test_a_hidden_or_truncated_kallsyms_does_not_count_as_a_full_read(host, lines):
    """After a full read, all missing symbols would be considered unloaded."""
    reader = BaselineReader(host(lines=lines))
    hidden = lines is not LINES
    assert reader.read_all(lambda: hidden).action is KsymbolAction.PROGRAMS_READ


def facts(**more):
    values = {
        "type": 1, "id": 5, "tag": "a" * 16, "name": "short", "load_time_ns": 3, "btf_id": 0,
        "starts": (10, 20), "lengths": (4, 5), "tags": ("b" * 16, "c" * 16), "types": (),
    }  # fmt: skip
    return ProgramFacts(**{**values, **more})


def test_program_function_names_match_the_kernel(monkeypatch):
    """Without BTF, the first function has the program's name, and other functions are named F."""
    reader = ProgramReader()
    assert reader._function_names(facts()) == [f"bpf_prog_{'a' * 16}_short",
                                               f"bpf_prog_{'c' * 16}_F"]  # fmt: skip
    assert reader._function_names(facts(name="", starts=(1,)))[0] == f"bpf_prog_{'a' * 16}"
    long = "a_name_of_more_than_fifteen_bytes"
    reader._btf[9] = ProgramBtf({3: long, 4: "helper"}, b"")
    assert reader._function_names(facts(btf_id=9, types=(3, 4))) == [
        f"bpf_prog_{'a' * 16}_{long}", f"bpf_prog_{'c' * 16}_helper"
    ]  # fmt: skip
