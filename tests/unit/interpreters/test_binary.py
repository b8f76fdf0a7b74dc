"""The CPython binaries on this machine are read, and corrupt binaries are rejected."""

import contextlib
import json
import os
import random
import sys
from pathlib import Path

import pytest

from otel_kprofiler.elf import (
    FileSource,
    ImageSource,
    find_section,
    find_symbols,
    read_elf,
    read_sections,
)
from otel_kprofiler.interpreters import InterpreterRefused, Refusal, find_interpreter, open_own
from tests.interpreters import VERSIONS, require_pythons

_ASK = """
import json, sys
from types import CodeType
at, maps = id(CodeType), open("/proc/self/maps").read().splitlines()
for line in maps:
    start, end = (int(one, 16) for one in line.split()[0].split("-"))
    if start <= at < end:
        print(json.dumps(line.split(None, 5)[5]))
"""


def read(path):
    with open(path, "rb") as file:
        return find_interpreter(FileSource(file.fileno(), os.fstat(file.fileno()).st_size))


@pytest.fixture(scope="module")
def own_file():
    """Returns the content of the file that contains this process's interpreter."""
    at = id(type(read.__code__))
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start <= at < end:
            return Path(line.split(None, 5)[5]).read_bytes()
    raise AssertionError


@pytest.mark.system
@pytest.mark.parametrize("minor", VERSIONS)
def test_installed_interpreters_are_recognized_with_their_version(minor):
    for python in require_pythons(minor):
        assert str(read(json.loads(python.run("-c", _ASK).stdout)).version) == python.version


def test_none_is_returned_for_files_that_are_not_python_interpreters():
    assert read("/bin/sh") is None
    assert find_interpreter(ImageSource(b"")) is None
    assert find_interpreter(ImageSource(b"\x7fELF" + bytes(100))) is None


def test_addresses_read_from_the_interpreters_file_match_the_running_interpreter(own_file):
    interpreter = find_interpreter(ImageSource(own_file))
    own = open_own()
    assert own.interpreter == interpreter
    assert own.process.code_type == id(type(read.__code__))


def refusal(content, machine="x86_64"):
    with pytest.raises(InterpreterRefused) as refused:
        find_interpreter(ImageSource(bytes(content)), machine)
    return refused.value.refusal


def renamed(content, old, new):
    assert content.count(old) >= 1
    return content.replace(old, new)


def test_files_without_the_required_symbols_are_rejected(own_file):
    content = renamed(own_file, b"\0PyCode_Type\0", b"\0XyCode_Type\0")
    assert refusal(content) is Refusal.NO_SYMBOLS
    content = renamed(own_file, b"\0_PyEval_EvalFrameDefault\0", b"\0_XyEval_EvalFrameDefault\0")
    assert refusal(content) is Refusal.NO_SYMBOLS


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="_PyRuntime itself has the version")
def test_python_binaries_without_a_version_are_rejected(own_file):
    content = renamed(own_file, b"\0Py_Version\0", b"\0Xy_Version\0")
    assert refusal(content) is Refusal.UNKNOWN_VERSION


def test_debug_builds_of_python_are_rejected(own_file):
    content = renamed(own_file, b"\0PyImport_ImportModule\0", b"\0_Py_NegativeRefcount\0\0")
    assert refusal(content) is Refusal.DEBUG_BUILD


def test_no_interpreter_is_found_in_files_for_other_architectures(own_file):
    assert find_interpreter(ImageSource(own_file), "aarch64") is None


def test_corrupt_interpreter_files_are_parsed_or_rejected(own_file):
    source = ImageSource(own_file)
    elf = read_elf(source)
    tables = [section for section in read_sections(source, elf) if section.kind in (2, 3, 11)]
    start, count, _ = elf.section_headers
    ranges = [(0, 64), (start, 64 * count)] + [(table.offset, table.size) for table in tables]
    generator = random.Random(1)
    for _ in range(60):
        content = bytearray(own_file)
        for _ in range(generator.choice((1, 3, 200))):
            begin, size = generator.choice(ranges)
            content[begin + generator.randrange(size)] = generator.randrange(256)
        with contextlib.suppress(InterpreterRefused):
            find_interpreter(ImageSource(bytes(content)))
    for end in range(0, len(own_file), len(own_file) // 50):
        with contextlib.suppress(InterpreterRefused):
            find_interpreter(ImageSource(own_file[:end]))


def test_symbols_are_looked_up_by_name(own_file):
    source = ImageSource(own_file)
    elf = read_elf(source)
    symbols = find_symbols(source, read_sections(source, elf), [b"_PyRuntime", b"not there"])
    assert list(symbols) == [b"_PyRuntime"]
    assert symbols[b"_PyRuntime"].address == find_section(source, elf, b".PyRuntime").address
