"""``otel_thread_ctx_v1`` is located in the memory of real programs."""

import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import subprocess

import pytest

from otel_kprofiler.bpf import ContextPlace
from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, Access, parse_mappings, read_maps, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.processes import SCHEMA, ProcessContexts, ProcessResources, thread_contexts
from otel_kprofiler.processes.thread_pointer import (
    find_context_place,
    find_objects,
    parse_headers_address,
)
from tests.thread_contexts import MODELS, Program

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="thread contexts need x86-64"),
]
STATIC = re.compile("local|(opened_)?initial|descriptor")
DYNAMIC = {"stride": 16, "length_at": -16, "vector_at": 8}  # in glibc


class Registered(dict):
    """A registry that stores the location of each process's contexts."""

    def register(self, pid, start_time_ns, stack_start, place):
        self[pid] = place

    def release(self, pid):
        del self[pid]


class Image:
    def __init__(self, pid):
        files = Access()
        self.objects = find_objects(parse_mappings(read_maps(files, pid)))
        self.headers_at = parse_headers_address(files.read_bytes(f"/proc/{pid}/auxv"))
        self._pages = {}
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for part in parse_mappings(read_maps(files, pid)):
                if part.path.startswith("[v"):
                    continue
                memory.seek(part.start)
                self._pages[part.start, part.end] = memory.read(part.end - part.start)

    def read(self, address, size):
        for (start, end), data in self._pages.items():
            if start <= address and address + size <= end:
                return data[address - start : address - start + size]
        raise OSError(f"no {size} bytes at {address:#x}")

    def find(self, read=None):
        return find_context_place(read or self.read, self.objects, self.headers_at)


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def image_of(tmp_path_factory):
    images = {}

    def get(name):
        if name not in images:
            with Program(tmp_path_factory.mktemp(name), name, threads=2, late_ms=1) as program:
                program.wait_ready()
                with stopped(program.pid):  # prevents the threads from mapping memory
                    images[name] = Image(program.pid)
        return images[name]

    return get


@pytest.mark.parametrize("name", [name for name in MODELS if STATIC.match(name)])
def test_static_tls_is_an_offset_from_the_thread_pointer(image_of, name):
    """TLS descriptors in DT_NEEDED libraries are also static."""
    place = image_of(name).find()
    assert place == ContextPlace(place.offset)
    assert -4096 < place.offset <= -8


@pytest.mark.parametrize("name", ["general_dynamic", "general_dynamic_symbolic", "sysv_hash"])
def test_general_dynamic_tls_is_located_by_module_and_offset(image_of, name):
    assert image_of(name).find() == ContextPlace(0, 1, **DYNAMIC)


def test_a_dlopened_library_has_a_separate_tls_module(image_of):
    offset = 1 << 20
    place = image_of("opened_general_dynamic").find()
    assert place in [ContextPlace(at, place.module, **DYNAMIC) for at in (0, offset)]
    assert image_of("opened_descriptor").find() == place._replace(generation=place.module)


def test_a_program_without_the_context_variable_has_no_tls_location(tmp_path):
    process = subprocess.Popen([shutil.which("cat")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        process.stdin.write(b"x")
        process.stdin.flush()
        process.stdout.read(1)
        assert Image(process.pid).find() is None
        process.stdin.close()


@pytest.mark.parametrize("name", ["descriptor", "general_dynamic", "initial_exec"])
def test_unrelocated_got_entries_yield_no_tls_location(image_of, name):
    image = image_of(name)
    (library,) = [part for part in image.objects if "libcontext" in part.path]

    def read(address, size):
        data = image.read(address, size)
        is_word = library.start <= address < library.end and size == 16
        return data if not is_word or address - library.start < 0x2000 else bytes(16)

    assert image.find(read) is None


@pytest.mark.parametrize("name", ["local_exec", "opened_descriptor", "sysv_hash"])
def test_reading_corrupt_memory_raises_no_error(image_of, name):
    image, rng = image_of(name), random.Random(name)
    reads = 0

    def read(address, size):
        nonlocal reads
        reads += 1
        data = image.read(address, size)
        if rng.random() < 0.05:
            raise OSError("unmapped")
        if rng.random() < 0.1:
            damaged = bytearray(data)
            for _ in range(3):
                damaged[rng.randrange(size)] = rng.randrange(256)
            return bytes(damaged)
        return data

    for _ in range(200):
        reads = 0
        place = image.find(read)
        assert place is None or isinstance(place, ContextPlace)
        assert reads < 20_000


@pytest.mark.parametrize("limit", ["_MAX_BLOCKED_S", "_MAX_CPU_S"])
def test_a_slow_search_does_not_unregister_a_process(tmp_path, monkeypatch, limit):
    registered = Registered()
    monkeypatch.setattr(thread_contexts, "_AGAIN_S", 0)
    monkeypatch.setattr(thread_contexts, "_SHARE", 0)
    monkeypatch.setattr(thread_contexts, "_CPU_SHARE", 0)
    threads = thread_contexts.PublishedThreads(Access(), registered)
    with Program(tmp_path, "local_exec", threads=1, late_ms=1) as program:
        program.wait_ready()
        key = ProcessKey(program.pid, 1)
        with open(f"/proc/{program.pid}/mem", "rb") as memory:
            extra = {SCHEMA: thread_contexts.SCHEMAS[0]}
            threads.update(key, 1, extra, memory.fileno())
            assert list(registered) == [program.pid]
            monkeypatch.setattr(thread_contexts, limit, -1000)
            threads.update(key, 1, extra, memory.fileno())
            assert list(registered) == [program.pid]


@pytest.mark.parametrize("announcements", [(True,), (False, True), (False, True, False, True)])
def test_a_process_that_stops_announcing_contexts_is_unregistered(tmp_path, announcements):
    registered = Registered()
    threads = thread_contexts.PublishedThreads(Access(), registered)
    with Program(tmp_path, "local_exec", threads=1, late_ms=1) as program:
        program.wait_ready()
        key = ProcessKey(program.pid, 1)
        with open(f"/proc/{program.pid}/mem", "rb") as memory:
            for is_announced in (*announcements, False):
                extra = {SCHEMA: thread_contexts.SCHEMAS[0]} if is_announced else {}
                threads.update(key, 1, extra, memory.fileno())
                assert list(registered) == [program.pid] * is_announced


def test_the_program_header_address_is_zero_if_the_auxiliary_vector_lacks_at_phdr():
    assert parse_headers_address(b"") == 0
    assert parse_headers_address(bytes(ctypes.c_uint64(3)) + b"\1") == 0


def test_attribute_names_are_read_for_a_process_first_seen_in_wait_totals(tmp_path):
    contexts = ProcessContexts(Access(), first_look_s=0, answer_timeout_s=30)
    resources = ProcessResources(Access(), Clock(), {}, contexts=contexts)
    resources.follow_threads(Registered())
    with Program(tmp_path, "local_exec", threads=1, late_ms=1) as program:
        program.wait_ready()
        waited = ProcessKey(program.pid, read_start_ticks(Access(), program.pid) * TICK_NS)
        # a process key from wait totals does not identify the program
        resource = resources.get_of(waited)
        resources.renew([resource])
        key = waited._replace(exec_id=7, owner=os.geteuid())
        assert resources.decode_context(key, b"\1\0\0\1x", None) == (None, (("span.hex", "x"),))
    resources.close()
