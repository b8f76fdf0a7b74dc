"""User code in real processes and files is resolved as mapped at the time of the lookup."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
from samplers import spawned
from unwind_maps import compile_c

from otel_kprofiler.elf import ElfError, ElfProblem
from otel_kprofiler.host import Access, ProcessMaps
from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols import (
    ElfResolver,
    ProcessesResolver,
    ProcessResolver,
    Symbolizer,
    SymbolSources,
    find_process,
)
from otel_kprofiler.symbols.resolvers.mapped import MappedCode
from otel_kprofiler.symbols.user.lines_error import LinesProblem
from tests.public import NOBODY

pytestmark = pytest.mark.live

LIBRARY = """
    __attribute__((noinline)) int NAME(int x) { return x * 3 + 1; }
    int unused(int x) { return NAME(x); }
"""
LOADS = """
import ctypes, os, sys
library = function = None
for line in sys.stdin:
    command, *words = line.split()
    if command == "load":
        library = ctypes.CDLL(words[0])
        function = ctypes.cast(getattr(library, words[1]), ctypes.c_void_p).value
    elif command == "unload":
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
    elif command == "exec":
        os.execv(words[0], words)
    print(function, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def first(folder):
    return library(folder, "first")


@pytest.fixture(scope="module")
def second(folder):
    return library(folder, "second")


def library(folder, name):
    source = LIBRARY.replace("NAME", name)
    return compile_c(folder / f"{name}.so", source, "-shared", "-fPIC", "-O1")


class Child:
    """A process that loads and unloads libraries on command."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    def send(self, *words):
        """Sends a command, and returns the current or last address of the library's function."""
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def running():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with spawned(sys.executable, "-c", LOADS, **pipes) as process:
        yield Child(process)


@pytest.fixture
def child():
    with running() as started:
        yield started


@pytest.fixture
def processes():
    resolver = ProcessesResolver()
    yield resolver
    resolver.close()


def symbol(path, name):
    """Returns the address and size of a symbol, according to binutils."""
    result = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[7] == name:
            return int(fields[1], 16), int(fields[2])
    raise LookupError(name)


def offset_of(path, address):
    result = subprocess.run(["readelf", "-lW", path], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        fields = line.split()
        if fields[:1] == ["LOAD"]:
            offset, start, _, size = (int(word, 16) for word in fields[1:5])
            if start <= address < start + size:
                return address - start + offset
    raise LookupError(address)


@pytest.mark.parametrize("options", [("-no-pie",), ("-pie",), ("-static-pie",)])
def test_virtual_addresses_in_a_file_are_distinguished_from_file_offsets(tmp_path, options):
    path = compile_c(tmp_path / "program", "int main(void) { return 7; }\n", *options)
    address, size = symbol(path, "main")
    offset = offset_of(path, address)
    assert "-no-pie" not in options or address != offset
    resolver = ElfResolver(path)
    (result,) = resolver.find("main")
    inside, behind = resolver.resolve([address + 3, address + size - 1])
    (at_offset,) = resolver.resolve_offsets([offset + 3])
    assert (result.address, result.module_address, result.file_offset) == (address, address, offset)
    assert (inside.function, inside.offset, inside.file_offset) == ("main", 3, offset + 3)
    assert (at_offset.address, at_offset.function) == (address + 3, "main")
    assert behind.function == "main"
    (nowhere,) = resolver.resolve_offsets([1 << 40])
    assert (nowhere.unresolved, nowhere.module) == (Unresolved.UNMAPPED, None)
    assert resolver.find("no_such_name") == []


def test_a_file_may_be_given_as_path_descriptor_or_content(first):
    content = first.read_bytes()
    with open(first, "rb") as file:
        resolvers = [ElfResolver(first), ElfResolver(file.fileno()), ElfResolver(content)]
    results = [resolver.find("first")[0] for resolver in resolvers]
    assert len({(each.address, each.file_offset, each.build_id) for each in results}) == 1
    assert {resolver.file_id for resolver in resolvers} == {results[0].module.file_id}


def test_every_field_of_a_resolved_address_is_set(child, processes, first):
    start = child.send("load", first, "first")
    (answer,) = processes.resolve([start + 2], child.pid)
    address, _ = symbol(first, "first")
    assert (answer.address, answer.function, answer.offset) == (start + 2, "first", 2)
    assert (answer.path, answer.module.name) == (str(first), "first.so")
    assert answer.module_address == address + 2
    assert answer.file_offset == offset_of(first, address) + 2
    assert answer.process == find_process(child.pid)
    assert answer.build_id == ElfResolver(first).build_id
    assert str(answer) == f"{start + 2:#x} first+0x2 first.so+{address + 2:#x}"


def test_names_and_file_offsets_resolve_to_addresses(child, processes, first):
    start = child.send("load", first, "first")
    (result,) = processes.find("first", child.pid)
    assert (result.address, result.path) == (start, str(first))
    places = processes.find_offset(str(first), result.file_offset, child.pid)
    assert [(place.address, place.function) for place in places] == [(start, "first")]
    assert processes.find_offset(str(first), 1 << 40, child.pid) == []
    assert processes.find("first", os.getpid()) == []


def test_unmapped_code_is_not_named(child, processes, first, second):
    old = child.send("load", first, "first")
    assert processes.resolve([old], child.pid)[0].function == "first"
    child.send("unload")
    (gone,) = processes.resolve([old], child.pid)
    assert (gone.function, gone.unresolved) == ("", Unresolved.UNMAPPED)
    new = child.send("load", second, "second")
    assert processes.resolve([new], child.pid)[0].function == "second"


def test_addresses_in_a_replaced_library_resolve_to_names_from_the_new_library(
    child, processes, tmp_path, first, second
):
    """The new library has the same path and addresses, and usually the same inode number."""
    path = tmp_path / "replaced.so"
    for _ in range(3):
        for other, name in ((first, "first"), (second, "second")):
            path.write_bytes(other.read_bytes())
            start = child.send("load", path, name)
            assert processes.resolve([start], child.pid)[0].function == name
            child.send("unload")
            path.unlink()


def test_functions_in_a_deleted_library_are_still_named(child, processes, tmp_path, first):
    path = tmp_path / "deleted.so"
    path.write_bytes(first.read_bytes())
    start = child.send("load", path, "first")
    path.unlink()
    (answer,) = processes.resolve([start], child.pid)
    assert (answer.function, answer.module.name) == ("first", "deleted.so (deleted)")
    assert answer.path == str(path)


def test_names_from_the_previous_program_are_not_used_after_exec(child, processes, first):
    start = child.send("load", first, "first")
    assert processes.resolve([start], child.pid)[0].function == "first"
    resolver = ProcessResolver(child.pid, processes)
    child._process.stdin.write("exec /bin/sleep 100\n")
    child._process.stdin.flush()
    while os.path.basename(os.readlink(f"/proc/{child.pid}/exe")) != "sleep":
        threading.Event().wait(0.01)
    for answer in (*resolver.resolve([start]), *processes.resolve([start], child.pid)):
        assert answer.function != "first"


def test_addresses_in_an_exited_process_are_not_resolved(processes, first):
    with running() as child:
        start = child.send("load", first, "first")
        resolver = ProcessResolver(child.pid, processes)
        assert resolver.resolve([start])[0].function == "first"
    (answer,) = resolver.resolve([start])
    assert answer.unresolved is Unresolved.PROCESS_GONE
    assert answer.process == resolver.process
    assert resolver.find("first") == []
    assert processes.resolve([start], child.pid)[0].unresolved is Unresolved.PROCESS_GONE


def test_a_process_resolver_does_not_resolve_addresses_after_its_pid_is_reused(processes, first):
    with running() as child:
        child.send("load", first, "first")
        resolver = ProcessResolver(child.pid, processes)
    pid = child.pid
    time.sleep(0.02)  # start times have a resolution of 10 ms
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(pid - 1))
    except OSError as error:
        pytest.skip(f"pids cannot be chosen: {error}")
    with running() as other:
        if other.pid != pid:
            pytest.skip("the pid was taken by a third process")
        start = other.send("load", first, "first")
        assert resolver.resolve([start])[0].unresolved is Unresolved.PROCESS_GONE
        assert resolver.find("first") == []
        (answer,) = processes.resolve([start], pid)
        assert (answer.function, answer.process) == ("first", find_process(pid))
        assert answer.process != resolver.process


def test_addresses_in_an_inaccessible_process_are_reported_as_hidden(public_python, child, first):
    start = child.send("load", first, "first")
    code = (
        "import sys\n"
        "from otel_kprofiler.symbols import ProcessesResolver\n"
        "processes = ProcessesResolver()\n"
        "answer, = processes.resolve([int(sys.argv[2])], int(sys.argv[1]))\n"
        "print(answer.unresolved.name, processes.find('first', int(sys.argv[1])))"
    )
    result = subprocess.run(
        [*NOBODY, public_python.command, "-c", code, str(child.pid), str(start)],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    assert result.stdout == "PROCESS_HIDDEN []\n"


def test_a_resolver_for_one_process_does_not_resolve_other_processes(processes):
    resolver = ProcessResolver(os.getpid(), processes)
    start = ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value
    assert resolver.resolve([start])[0].function == "PyObject_Call"
    assert resolver.resolve([start], os.getpid())[0].function == "PyObject_Call"
    assert resolver.resolve([start], os.getppid())[0].unresolved is Unresolved.PROCESS_GONE


@pytest.fixture
def anonymous():
    """Maps anonymous executable memory, and returns its address."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 4096, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    yield ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.close()


def test_code_in_anonymous_memory_is_reported_as_having_no_file(processes, anonymous):
    (answer,) = processes.resolve([anonymous], os.getpid())
    assert (answer.unresolved, answer.module, answer.path) == (Unresolved.NO_FILE, None, "")
    (vdso,) = processes.find("__vdso_gettimeofday", os.getpid())
    assert vdso.module.name == "[vdso]"
    assert processes.resolve([vdso.address], os.getpid())[0].function in {
        "gettimeofday",
        "__vdso_gettimeofday",
    }


def test_jit_compiled_code_is_named_from_its_perf_map(processes, anonymous):
    """Like a JIT compiler, the test writes the map before the code runs."""
    start, path = anonymous, f"/tmp/perf-{os.getpid()}.map"
    if os.path.exists(path):
        pytest.skip("this process has a perf map already")
    assert processes.resolve([start], os.getpid())[0].unresolved is Unresolved.NO_FILE
    try:
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            print(f"{start:x} 20 compiled one", file=file)
        answers = processes.resolve([start + 4, start + 0x20], os.getpid())
        assert [answer.function for answer in answers] == ["compiled one", ""]
        assert (answers[0].offset, answers[0].module) == (4, None)
        with open(path, "a") as file:
            print(f"{start + 0x20:x} 10 another", file=file)
        assert processes.resolve([start + 0x20], os.getpid())[0].function == "another"
    finally:
        os.unlink(path)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (None, Unresolved.NO_PROCESS),
        (4_194_305, Unresolved.PROCESS_GONE),
        (-1, Unresolved.PROCESS_GONE),
    ],
)
def test_an_address_without_a_process_is_unresolved_with_a_reason(processes, asked, reason):
    (answer,) = processes.resolve([0x1000], asked)
    assert answer.unresolved is reason
    assert processes.find("main", asked) == []


def test_an_address_in_a_non_elf_file_resolves_to_its_file_offset(processes, tmp_path):
    path = tmp_path / "code"
    path.write_bytes(bytes(8192))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096, offset=4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    (answer,) = processes.resolve([start + 5], os.getpid())
    assert (answer.unresolved, answer.path) == (Unresolved.NO_SYMBOL_TABLE, str(path))
    assert (answer.file_offset, answer.module_address, answer.build_id) == (4101, 4101, None)


@pytest.mark.parametrize("error", [ElfError(ElfProblem.DAMAGED_HEADERS), OSError("disk")])
def test_a_file_with_unreadable_symbols_is_still_identified(child, first, error):
    start = child.send("load", first, "first")
    damaged = ProcessesResolver(symbols=Broken(error))
    (answer,) = damaged.resolve([start], child.pid)
    assert answer.unresolved is Unresolved.SYMBOLS_REFUSED
    assert (answer.path, answer.build_id) == (str(first), ElfResolver(first).build_id)
    assert damaged.find("first", child.pid) == []


class Broken:
    def __init__(self, error):
        self.error = error

    def read(self, source, elf, details, root=""):
        raise self.error


def test_symbols_are_read_once_for_all_processes_and_evicted_by_size(first, second):
    reads = []

    class Counting:
        def read(self, source, elf, details, root=""):
            reads.append(details.path)
            return SymbolSources().read(source, elf, details, root)

    kept, small = ProcessesResolver(symbols=Counting()), None
    with running() as one, running() as two:
        starts = [(child, child.send("load", first, "first")) for child in (one, two)]
        for child, start in 2 * starts:
            assert kept.resolve([start], child.pid)[0].function == "first"
        assert reads == [str(first)]
        other = two.send("load", second, "second")
        small = ProcessesResolver(symbols=Counting(), max_bytes=1)
        reads.clear()
        for _ in range(2):
            answers = small.resolve([starts[1][1], other], two.pid)
            assert [answer.function for answer in answers] == ["first", "second"]
        assert len(reads) == 4


def test_source_lines_are_read_once_the_file_system_responds_again(first):
    now_s, problems = 0.0, []

    class Stalled:
        def read(self, source, elf, details, root=""):
            symbols = SymbolSources().read(source, elf, details, root)
            if problems:
                symbols.lines_problem, symbols.can_retry_lines = problems.pop(), True
            return symbols

    with running() as child:
        start = child.send("load", first, "first")
        process = find_process(child.pid)
        maps = ProcessMaps(child.pid, Access())
        mapping = maps.find(start).mapping
        maps.close()
        problems[:] = [LinesProblem.UNANSWERED] * 2
        code = MappedCode(Stalled(), Access(), now_s=lambda: now_s)
        read = [code.get(process, mapping) for _ in range(3)]
        now_s = 31.0
        read += [code.get(process, mapping) for _ in range(2)]
        now_s = 90.0
        assert code.get(process, mapping) is read[-1], "it is read again at fixed intervals"
        now_s = 92.0
        read += [code.get(process, mapping)]
        now_s = 1000.0
        read += [code.get(process, mapping)]
        assert [file.symbols.lines_problem is not None for file in read] == [True] * 5 + [False] * 2
        assert [a is b for a, b in pairwise(read)] == [True, True, False, True, False, True]
        assert code._bytes == read[-1].nbytes


def test_addresses_resolve_while_libraries_are_loaded_and_unloaded(child, processes, first, second):
    wrong, stop = [], threading.Event()
    python = ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value

    def ask():
        while not stop.is_set():
            answers = processes.resolve([python, 0x10], os.getpid())
            if [answer.function for answer in answers] != ["PyObject_Call", ""]:
                wrong.append(answers)

    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        stack.callback(stop.set)
        asked = [pool.submit(ask) for _ in range(3)]
        for path, name in 10 * ((first, "first"), (second, "second")):
            start = child.send("load", path, name)
            assert processes.resolve([start], child.pid)[0].function == name
            child.send("unload")
    assert not any(future.exception() for future in asked)
    assert not wrong


def test_the_default_symbolizer_names_kernel_and_user_addresses(child, first):
    start = child.send("load", first, "first")
    with Symbolizer.default() as symbolizer:
        (kernel, *_) = symbolizer.find("vfs_read") or [None]
        if kernel is None:
            pytest.skip("symbols of the kernel are hidden")
        answers = symbolizer.resolve([kernel.address + 1, start + 1, 0x10], child.pid)
        assert [answer.function for answer in answers] == ["vfs_read", "first", ""]
        assert [answer.process for answer in answers] == [None, *2 * [find_process(child.pid)]]
        assert symbolizer.find("first", child.pid)[0].address == start
