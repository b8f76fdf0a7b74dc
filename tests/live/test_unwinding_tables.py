"""Unwind tables for real files are loaded into BPF maps, and evicted."""

import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from unwind_maps import WAITS, KernelMaps, compile_c, request_of

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.bpf import PAGE_BYTES
from otel_kprofiler.host import Access, FileRequest
from otel_kprofiler.model import FileKey
from otel_kprofiler.stopping import stop_within
from otel_kprofiler.unwinding import Limits, TableStore
from otel_kprofiler.unwinding.build_queue import BuildQueue
from otel_kprofiler.unwinding.image import write_image
from otel_kprofiler.unwinding.indexing import Children
from otel_kprofiler.unwinding.maps import Content, FileState, TableMaps
from otel_kprofiler.unwinding.refusal import Refusal
from otel_kprofiler.unwinding.request import VDSO
from tests.fuse import mounted
from tests.raw_forks import python_fork, run_in_child
from tests.waiting import wait_until

pytestmark = pytest.mark.live

LIBC = os.path.realpath("/lib/x86_64-linux-gnu/libc.so.6")
SECOND_NS = 1_000_000_000
WITHOUT_TABLE = ("-static", "-Wl,--no-eh-frame-hdr")


class Known(Access):
    """An ``Access`` that opens files by their requested paths, without a process."""

    def __init__(self):
        super().__init__()
        self.paths = {}

    def read_link(self, path):
        return self.paths.get(path) or super().read_link(path)

    def ask(self, path, number):
        request = request_of(path, tgid=number, start=0x1000, end=0x2000)
        self.paths[f"/proc/{number}/map_files/1000-2000"] = os.fspath(path)
        return request


class Running:
    """A running store with separate maps, and a clock, ``now_ns``, that tests set."""

    def __init__(self, limits=None, **sizes):
        self.kernel = KernelMaps(**sizes)
        self.files = Known()
        self.now_ns = 100 * SECOND_NS
        self.numbers = iter(range(5_000_000, 6_000_000))  # above pid_max
        self.store = TableStore(
            self.kernel.open(), self.files, limits or Limits(), lambda: self.now_ns
        )
        self.store.start()

    def ask(self, path):
        request = self.files.ask(path, next(self.numbers))
        self.store.request(request)
        return request.key

    def load(self, *paths):
        keys = [self.ask(path) for path in paths]
        self.settle()
        return keys

    def settle(self):
        wait_until(lambda: not self.store.counts().pending)
        counts = self.store.counts()
        assert counts.requested == counts.loaded + sum(counts.refused.values())
        return counts

    def close(self):
        self.store.close()
        self.kernel.close()


@pytest.fixture
def start():
    running = []

    def begin(*args, **kwargs):
        running.append(Running(*args, **kwargs))
        return running[-1]

    yield begin
    for one in running:
        one.close()


@pytest.fixture
def hanging_write(monkeypatch):
    """Makes table writes hang: each sets the first returned event, then waits for the second."""
    hangs, go_on = threading.Event(), threading.Event()

    def hang(*args):
        hangs.set()
        assert go_on.wait(60)
        write_image(*args)

    monkeypatch.setattr("otel_kprofiler.unwinding.loading.write_image", hang)
    return hangs, go_on


def test_a_hanging_thread_never_writes_to_maps_that_reuse_its_descriptors(hanging_write):
    """The thread may outlive the maps, whose descriptors may then refer to other maps."""
    hangs, go_on = hanging_write
    running = Running()
    key = running.ask(LIBC)
    assert hangs.wait(60)
    with stop_within(0):
        running.close()
    other = KernelMaps()
    go_on.set()
    running.settle()
    assert running.store.counts().loaded == 1
    assert other.file(key) is None
    other.close()
    await_release()


def await_release():
    for thread in threading.enumerate():
        if thread.name == "kprofiler-release":
            thread.join(60)
            assert not thread.is_alive()


def test_bpf_maps_are_released_when_the_last_hanging_thread_exits(hanging_write, monkeypatch):
    hangs, go_on = hanging_write
    released = []
    close = TableMaps.close
    monkeypatch.setattr(TableMaps, "close", lambda maps: (close(maps), released.append(maps)))
    running = Running()
    running.ask(LIBC)
    assert hangs.wait(60)
    with stop_within(0):
        running.close()
    assert not released
    go_on.set()
    await_release()
    assert len(released) == 1


def section(path, name):
    with open(path, "rb") as file:
        section_by_name = ELFFile(file).get_section_by_name(name)
        return section_by_name["sh_addr"], section_by_name.data()


@pytest.mark.parametrize("path", [LIBC, "/usr/bin/bash", "/usr/bin/python3.11", "/usr/bin/gcc"])
def test_the_bpf_map_contains_the_same_tables_as_the_file(start, path):
    running = start()
    (key,) = running.load(path)
    header, data = running.kernel.loaded(key)
    address, search = section(path, ".eh_frame_hdr")
    frames_address, frames = section(path, ".eh_frame")
    assert (header.origin, header.frames_address) == (address, frames_address)
    assert data[256 : 256 + 8 * header.entries] == search[12:]
    result = data[header.frames_at : header.frames_at + header.frames_bytes]
    assert frames.startswith(result)
    assert not frames[len(result) :].strip(b"\0")  # only the terminator is omitted
    behind = data[header.frames_at + header.frames_bytes :]
    assert len(behind) >= 512
    assert not behind.strip(b"\0")


def test_loading_a_table_records_the_text_segments_and_identity_of_its_file(start):
    running = start()
    (key,) = running.load(LIBC)
    header, data = running.kernel.loaded(key)
    with open(LIBC, "rb") as file:
        texts = [
            (s["p_offset"], s["p_filesz"], s["p_vaddr"] - s["p_offset"])
            for s in ELFFile(file).iter_segments("PT_LOAD")
            if s["p_flags"] & 1
        ]
    assert header.texts == len(texts)
    assert list(struct.iter_unpack("=QQQ", data[40 : 40 + 24 * len(texts)])) == texts
    notes = subprocess.run(["readelf", "-n", LIBC], capture_output=True, text=True, check=True)
    details = running.store.known.get(key)
    assert details.build_id in notes.stdout
    assert (details.path, details.name, details.deleted) == (LIBC, "libc.so.6", False)


def test_the_unwind_table_of_the_vdso_is_loaded(start):
    running = start()
    running.store.request(FileRequest(VDSO, 0, 0, 0, 1, 1, 0, 0))
    running.settle()
    header, _ = running.kernel.loaded(VDSO)
    assert header.entries > 4
    details = running.store.known.get(VDSO)
    assert (details.name, len(details.texts)) == ("[vdso]", 1)
    assert details.build_id


def test_a_search_table_is_built_for_a_static_program_that_has_no_search_table(start, tmp_path):
    program = compile_c(tmp_path / "static", WAITS, *WITHOUT_TABLE)
    running = start()
    (key,) = running.load(program)
    header, data = running.kernel.loaded(key)
    again = compile_c(tmp_path / "linked", WAITS, "-static", "-Wl,--eh-frame-hdr")
    _, search = section(again, ".eh_frame_hdr")
    assert header.entries == int.from_bytes(search[8:12], "little")
    starts = [
        pair[0] + header.origin
        for pair in struct.iter_unpack("<ii", data[256:][: 8 * header.entries])
    ]
    assert starts == sorted(starts)


def test_unwind_tables_are_built_round_robin_by_process(start, tmp_path, monkeypatch):
    """One process requests many tables that must be built, another process a single one."""
    first, *many = copies(9, tmp_path / "static", *WITHOUT_TABLE)
    made, can_start, run = [], threading.Event(), Children.run

    def run_in_order(self, command, fd, limits):
        assert can_start.wait(60)
        made.append(os.readlink(f"/proc/self/fd/{fd}"))
        return run(self, command, fd, limits)

    monkeypatch.setattr(Children, "run", run_in_order)
    running = start()
    for number, path in enumerate(many):
        start_at = 0x2000 * number
        end_at = start_at + 0x1000
        running.files.paths[f"/proc/5999998/map_files/{start_at:x}-{end_at:x}"] = os.fspath(path)
        running.store.request(request_of(path, tgid=5_999_998, start=start_at, end=end_at))
    wait_until(lambda: len(running.store._builds) >= len(many) - 1)
    running.ask(first)
    wait_until(lambda: len(running.store._builds) >= len(many))
    can_start.set()
    wait_until(lambda: os.fspath(first) in made)
    assert made.index(os.fspath(first)) <= 1


def test_each_build_is_charged_its_cpu_time(start, tmp_path, monkeypatch):
    """Several threads wait for the children, and each measures the children it waited for."""
    charged, charge = [], BuildQueue.charge

    def record(self, cpu_ns):
        charged.append(cpu_ns)
        charge(self, cpu_ns)

    monkeypatch.setattr(BuildQueue, "charge", record)
    running = start()
    running.load(*copies(12, tmp_path / "static", *WITHOUT_TABLE))
    assert len(charged) == 12
    assert all(cpu_ns > 0 for cpu_ns in charged)
    assert running.store.counts().cpu_ns >= sum(charged)


def test_a_hanging_file_system_does_not_delay_builds_for_other_files(start, tmp_path, monkeypatch):
    """A file on it has the only turn, and another thread already waits for the file system."""
    local = copies(3, tmp_path / "static", *WITHOUT_TABLE)
    began, can_start, run = threading.Event(), threading.Event(), Children.run

    def run_later(self, command, fd, limits):
        began.set()
        assert can_start.wait(60)
        return run(self, command, fd, limits)

    monkeypatch.setattr(Children, "run", run_later)
    data = local[0].read_bytes()
    with mounted(tmp_path / "mount", {"turn": data, "other": data}, cached=False) as fuse:
        running = start()
        store = running.store
        running.ask(local[0])
        assert began.wait(60)
        key = running.ask(tmp_path / "mount/turn")
        wait_until(lambda: len(store._builds) == 1)
        hanging = running.files.ask(tmp_path / "mount/other", 5_999_000)
        fuse.freeze()
        store.request(hanging)
        wait_until(lambda: store._calls.has_left(key.device))
        can_start.set()
        keys = [running.ask(path) for path in local[1:]]
        loaded = {FileState.LOADED}
        wait_until(
            lambda: {file and file.state for file in map(running.kernel.file, keys)} == loaded
        )
        fuse.thaw()
        running.settle()
        running.kernel.loaded(key)


def test_files_without_tables_are_distinguished_from_files_with_unusable_tables(start, tmp_path):
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n" * 100)
    bare = compile_c(tmp_path / "bare", "int _start(void) { return 0; }", "-nostdlib",
                     "-fno-asynchronous-unwind-tables", "-Wl,--no-eh-frame-hdr")  # fmt: skip
    broken = tmp_path / "broken"
    data = bytearray(Path(LIBC).read_bytes())
    with open(LIBC, "rb") as file:
        at = ELFFile(file).get_section_by_name(".eh_frame_hdr")["sh_offset"]
    data[at + 12 : at + 20], data[at + 20 : at + 28] = (
        data[at + 20 : at + 28],
        data[at + 12 : at + 20],
    )
    broken.write_bytes(data)
    running = start()
    keys = running.load(text, bare, broken)
    states = [running.kernel.file(key).state for key in keys]
    assert states == [FileState.NO_TABLE, FileState.NO_TABLE, FileState.UNAVAILABLE]
    assert running.store.counts().refused == {
        Refusal.NOT_ELF: 1, Refusal.NO_FRAMES: 1, Refusal.NOT_SORTED: 1,
    }  # fmt: skip
    assert running.store.known.get(keys[0]).build_id is None
    assert running.store.known.get(keys[2]).build_id


def test_a_file_whose_processes_have_exited_is_unavailable_after_16_requests(start):
    running = start()
    key = FileKey(4_000_000_000, 1, 0)
    for count in range(1, 17):
        running.store.request(FileRequest(key, 0x1000, 0x2000, 0, 5_999_999, 5_999_999, 0, 0))
        assert running.settle().refused == {Refusal.GONE: count}
        if count == 1:
            assert running.kernel.file(key) is None
    assert running.kernel.file(key).state == FileState.UNAVAILABLE


def test_loading_unwind_tables_is_retried_after_a_temporary_failure(start, tmp_path):
    program = compile_c(tmp_path / "waits", WAITS)
    running = start()
    request = running.files.ask(program, 5_999_998)
    running.store.request(request._replace(size=1))
    assert running.settle().refused == {Refusal.NOT_SAME: 1}
    assert running.kernel.file(request.key).state == FileState.UNAVAILABLE
    running.now_ns += 31 * SECOND_NS
    # The store reads the clock again when it rejects a second file.
    other = running.files.ask(program, 5_999_997)
    running.store.request(other._replace(key=other.key._replace(inode=1), size=1))
    wait_until(lambda: running.kernel.file(request.key) is None)
    running.store.request(request)
    running.settle()
    running.kernel.loaded(request.key)


def test_loading_a_table_above_the_memory_limit_is_retried_at_growing_intervals(start, programs):
    running = start(Limits(total_bytes=image_bytes(start(), programs[0])))
    running.load(programs[0])
    request, holds = running.files.ask(programs[1], 5_999_998), []
    for _ in range(9):
        running.store.request(request)
        running.settle()
        holds.append((running.store._refused[request.key] - running.now_ns) // SECOND_NS)
    assert running.store.counts().refused == {Refusal.MEMORY_IN_USE: 9}
    assert holds == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]


def copies(count, path, *options):
    """Compiles a program, and returns the paths of ``count`` copies of it."""
    first = compile_c(path, WAITS, *options)
    return [first, *(Path(shutil.copy(first, f"{path}-{number}")) for number in range(1, count))]


@pytest.fixture
def programs(tmp_path):
    return copies(12, tmp_path / "program")


def image_bytes(running, path):
    running.load(path)
    return running.store.counts().bytes


def test_the_least_recently_used_table_is_evicted(start, programs):
    size = image_bytes(start(), programs[0])
    running = start(Limits(total_bytes=3 * size, idle_ns=SECOND_NS))
    first, second, third = running.load(*programs[:3])
    slots = {key: running.kernel.file(key).slot for key in (first, second, third)}
    for step, key in enumerate((second, first, third)):
        running.kernel.use(slots[key], running.now_ns + step)
    running.now_ns += 5 * SECOND_NS
    epoch = running.kernel.epoch()
    (fourth,) = running.load(programs[3])
    assert running.kernel.file(second) is None
    assert running.kernel.epoch() > epoch
    for key in (first, third, fourth):
        running.kernel.loaded(key)
    counts = running.store.counts()
    assert (counts.evicted, counts.tables, counts.bytes) == (1, 3, 3 * size)


def test_tables_in_use_are_not_evicted(start, programs):
    running = start(Limits(total_bytes=2 * image_bytes(start(), programs[0]), idle_ns=SECOND_NS))
    loaded = running.load(*programs[:2])
    (refused,) = running.load(programs[2])
    assert running.settle().refused == {Refusal.MEMORY_IN_USE: 1}
    assert running.kernel.file(refused).state == FileState.UNAVAILABLE
    for key in loaded:
        running.kernel.loaded(key)


def load_early(running, *paths, until_s=60.0):
    requests = [running.files.ask(path, next(running.numbers)) for path in paths]
    running.store.load_early(requests, time.monotonic() + until_s)
    return [request.key for request in requests]


def test_tables_are_preloaded_up_to_the_memory_limit(start, programs):
    running = start(Limits(total_bytes=2 * image_bytes(start(), programs[0]), idle_ns=SECOND_NS))
    first, rest = load_early(running, *programs[:2]), load_early(running, *programs[2:4])
    for key in first:
        running.kernel.loaded(key)
    assert [running.kernel.file(key) for key in rest] == [None, None]
    counts = running.settle()
    assert (counts.loaded, counts.evicted, counts.refused) == (2, 0, {})


def test_unused_preloaded_tables_are_evicted_first(start, programs):
    running = start(Limits(total_bytes=2 * image_bytes(start(), programs[0]), idle_ns=SECOND_NS))
    used, unused = load_early(running, *programs[:2])
    running.kernel.use(running.kernel.file(used).slot, running.now_ns)
    (wanted,) = running.load(programs[2])
    running.kernel.loaded(wanted)
    running.kernel.loaded(used)
    assert running.kernel.file(unused) is None


@pytest.fixture
def programs_without_tables(tmp_path):
    """Creates programs whose search tables must be built."""
    return copies(20, tmp_path / "static", *WITHOUT_TABLE)


def test_building_tables_for_preloading_does_not_use_up_the_cpu_budget(
    start, programs_without_tables, monkeypatch
):
    """Each table costs half of the budget. The clock is stopped, so the budget is not refilled."""
    spent_ns = iter(range(0, SECOND_NS * 1000, SECOND_NS // 2))
    monkeypatch.setattr("otel_kprofiler.unwinding.store.children_time_ns", lambda: next(spent_ns))
    running = start()
    *early, later = programs_without_tables
    for key in load_early(running, *early):
        running.kernel.loaded(key)
    (key,) = running.load(later)
    running.kernel.loaded(key)


def test_files_with_tables_are_preloaded_while_tables_for_other_files_are_built(
    start, programs, programs_without_tables, monkeypatch
):
    can_start, run = threading.Event(), Children.run

    def run_later(self, command, fd, limits):
        assert can_start.wait(60)
        return run(self, command, fd, limits)

    monkeypatch.setattr(Children, "run", run_later)
    running = start()
    words = (running, *programs_without_tables, programs[0])
    with ThreadPoolExecutor() as pool:
        keys = pool.submit(load_early, *words)
        wait_until(lambda: running.store.counts().loaded)
        can_start.set()
        for key in keys.result():
            running.kernel.loaded(key)


def test_the_wait_for_preloaded_tables_has_a_time_limit(start, programs, hanging_write):
    hangs, go_on = hanging_write
    running = start()
    (key,) = load_early(running, programs[0], until_s=0.2)
    assert hangs.wait(60)
    assert running.kernel.file(key).state == FileState.PENDING
    go_on.set()
    running.settle()
    running.kernel.loaded(key)


def test_a_file_whose_table_exceeds_the_size_limit_is_rejected(start):
    running = start(Limits(file_bytes=PAGE_BYTES * 4))
    (key,) = running.load(LIBC)
    assert running.kernel.file(key).state == FileState.UNAVAILABLE
    assert running.store.counts().refused == {Refusal.TOO_LARGE: 1}
    assert running.store.counts().bytes == 0


def test_each_table_loaded_into_a_reused_slot_has_a_new_serial_number(start, programs):
    running = start(Limits(idle_ns=0), slots=3)
    seen = []
    for path in programs * 2:
        (key,) = running.load(path)
        header, _ = running.kernel.loaded(key)
        seen.append(header.serial)
        running.now_ns += 1
    assert len(set(seen)) == len(seen)
    counts = running.store.counts()
    assert counts.tables == 3
    assert counts.evicted == counts.loaded - 3


def test_rejected_files_do_not_fill_the_file_map(start, tmp_path):
    running = start(files=16)
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"text-{number}")
        paths[-1].write_text("text")
    assert 0 < len([key for key in running.load(*paths) if running.kernel.file(key)]) <= 9


def test_unwind_tables_for_many_new_programs_replace_the_oldest_tables(start, tmp_path):
    running = start(Limits(idle_ns=0), slots=64, files=256)
    keys = running.load(*copies(150, tmp_path / "copy"))
    counts = running.store.counts()
    states = Counter(value.state for key in keys if (value := running.kernel.file(key)))
    assert counts.loaded == 150
    assert counts.evicted == 150 - 64
    assert states == {FileState.LOADED: 64}


def test_tables_do_not_remain_resident_in_the_agent(start):
    running = start()
    big = max(Path("/usr/lib").rglob("libLLVM*.so*"), key=lambda path: path.stat().st_size)
    running.load(LIBC)
    before = read_resident_bytes()
    running.load(big)
    assert running.store.counts().bytes > 4 << 20
    assert read_resident_bytes() - before < 2 << 20


def test_closing_with_queued_requests_ends_all_threads(programs):
    running = Running()
    for path in programs:
        running.ask(path)
    running.close()
    assert not any(thread.is_alive() for thread in running.store._threads)


def test_a_forked_child_closes_its_descriptors_without_disturbing_its_parent(start, programs):
    running = start()
    running.load(programs[0])
    child = os.fork()
    if child == 0:
        running.store.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ready = select.poll()
    ready.register(running.store._wake_fd, select.POLLIN)
    assert not ready.poll(0)
    assert all(thread.is_alive() for thread in running.store._threads)
    (key,) = running.load(programs[1])
    running.kernel.loaded(key)


def test_no_bpf_map_stays_open_in_a_child_forked_while_a_thread_writes_a_table(monkeypatch):
    outside = list_maps()
    kernel = KernelMaps()
    maps = kernel.open()
    writing, forked = threading.Event(), threading.Event()

    def wait(*_):
        writing.set()
        forked.wait()

    def list_inherited():
        maps.close()
        kernel.close()
        return list_maps() - outside

    earlier = list_maps()
    monkeypatch.setattr("otel_kprofiler.unwinding.maps.write_pages", wait)
    thread = threading.Thread(target=maps.publish_table, args=(0, Content(1)))
    thread.start()
    writing.wait()
    try:
        assert len(list_maps()) == len(earlier) + 1
        assert run_in_child(python_fork, list_inherited) == ("set()", 0)
    finally:
        forked.set()
        thread.join()
        maps.close()
        kernel.close()


def list_maps():
    """Returns the open descriptors for BPF maps, and the addresses at which maps are mmapped."""
    links = {f"fd {fd}": f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    opened = {
        name
        for name, link in links.items()
        if os.path.lexists(link) and "bpf-map" in os.readlink(link)
    }
    lines = Path("/proc/self/maps").read_text().splitlines()
    return opened | {line.split()[0] for line in lines if "bpf-map" in line}
