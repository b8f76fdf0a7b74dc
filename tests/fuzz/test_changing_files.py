"""Tests reading other users' files that shrink, grow or change while they are being read."""

import itertools
import os
import random
import shutil
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from otel_kprofiler.elf import ElfError, FileSource, hash_file, read_elf
from otel_kprofiler.interpreters.binary import find_interpreter
from otel_kprofiler.interpreters.refusal import InterpreterRefused
from otel_kprofiler.model import FileDetails, OpenFile
from otel_kprofiler.symbols.user.loader_files import SymbolsRefused
from otel_kprofiler.symbols.user.names import SymbolSources, read_names
from otel_kprofiler.unwinding.indexing import Children
from otel_kprofiler.unwinding.loading import Code, find_loadable
from otel_kprofiler.unwinding.refusal import TableRefused

pytestmark = pytest.mark.fuzz

PROGRAM = "/usr/bin/python3"
SECONDS, MOST_SECONDS = 2, 60
PAGE_BYTES = 4096
SPARSE_BYTES = (1 << 63) - PAGE_BYTES
"""The maximum size of a file on tmpfs."""
REFUSALS = (ElfError, InterpreterRefused, SymbolsRefused, TableRefused)


@contextmanager
def changing(path):
    """Repeatedly truncates, extends and rewrites a program file while the block runs."""
    whole, ends = path.read_bytes(), threading.Event()
    sizes = [0, 1, 63, 64, PAGE_BYTES, len(whole) // 2, len(whole) - 1, SPARSE_BYTES]

    def change():
        choose = random.Random(1)
        while not ends.is_set():
            os.truncate(path, choose.choice([*sizes, choose.randrange(len(whole))]))
            time.sleep(choose.random() / 300)
            with path.open("r+b") as file:
                file.write(whole)
                file.truncate(len(whole))
            time.sleep(choose.random() / 100)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def read_headers(fd, size):
    source = FileSource(fd, size)
    hash_file(source)
    read_elf(source)


def read_symbols(fd, size):
    read_names(SymbolSources(), FileDetails("program", None, "", ()), OpenFile(fd, size, 0))


def read_interpreter(fd, size):
    find_interpreter(FileSource(fd, size))


def read_tables(fd, size):
    source = FileSource(fd, size)
    code = Code(source, read_elf(source), None)
    loadable = find_loadable(code, lambda make: make(children=Children()))
    loadable.fill(memoryview(bytearray(loadable.pages * PAGE_BYTES)), 1)


@pytest.fixture
def program():
    """Copies a program to tmpfs, where files may have any size up to 2**63 bytes."""
    path = Path(f"/dev/shm/kprofiler-test-{os.getpid()}")
    shutil.copy(Path(PROGRAM).resolve(), path)
    yield path
    path.unlink()


def test_files_that_change_while_being_read_are_rejected_with_a_reason(program):
    outcomes = Counter()
    readers = itertools.cycle([read_headers, read_symbols, read_interpreter, read_tables])
    expected = {(read.__name__, "refused") for read in (read_headers, read_symbols, read_tables)}
    began = time.monotonic()
    with changing(program):
        while (passed := time.monotonic() - began) < SECONDS or (
            expected - outcomes.keys() and passed < MOST_SECONDS
        ):
            read = next(readers)
            fd = os.open(program, os.O_RDONLY)
            try:
                read(fd, os.fstat(fd).st_size)
                outcomes[read.__name__, "read"] += 1
            except REFUSALS:
                outcomes[read.__name__, "refused"] += 1
            finally:
                os.close(fd)
    assert expected <= outcomes.keys()
