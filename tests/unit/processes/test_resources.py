"""Resources: the identity of processes and their attributes from /proc."""

import os

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access, parse_stat
from otel_kprofiler.model import ON_CPU, ProcessKey, RawSample
from otel_kprofiler.processes import ProcessResources, read_host_attributes

CONTAINER = "3f2a" * 16
TICK_NS = 10_000_000


def raw(tgid, start_ns, comm=b"main", tid=None):
    return RawSample(
        ON_CPU,
        1,
        1,
        0,
        tgid,
        tid or tgid,
        start_ns,
        0,
        comm,
        (),
        (),
        None,
    )


@pytest.fixture
def proc(tmp_path):
    """A /proc tree; call it to add a process."""

    def add(pid, ticks, exe="/usr/bin/server", cgroup="0::/\n", comm="a ) b"):
        directory = tmp_path / "proc" / str(pid)
        directory.mkdir(parents=True, exist_ok=True)
        rest = " ".join(["S", *["0"] * 18, str(ticks), *["0"] * 30])
        (directory / "stat").write_text(f"{pid} ({comm}) {rest}\n")
        (directory / "cgroup").write_text(cgroup)
        if exe:
            link = directory / "exe"
            link.unlink(missing_ok=True)
            link.symlink_to(exe)

    add.root = str(tmp_path)
    return add


def resources(proc, **kwargs):
    return ProcessResources(Access(proc.root), Clock(), {"host.name": "h"}, **kwargs)


def test_a_process_has_its_executable_container_and_creation_time(proc):
    proc(5, 300, cgroup=f"0::/kubepods/pod1/cri-containerd-{CONTAINER}.scope\n")
    attributes = resources(proc).get(raw(5, 300 * TICK_NS + 123)).attributes
    assert attributes["process.pid"] == 5
    assert attributes["process.executable.path"] == "/usr/bin/server"
    assert attributes["process.executable.name"] == "server"
    assert attributes["container.id"] == CONTAINER
    assert attributes["process.creation.time"].endswith("Z")
    assert attributes["host.name"] == "h"


def test_two_users_of_a_pid_never_share_a_resource(proc):
    proc(5, 300)
    found = resources(proc)
    old = found.get(raw(5, 100 * TICK_NS, comm=b"gone"))
    new = found.get(raw(5, 300 * TICK_NS))
    assert old is not new
    assert old.attributes["process.executable.name"] == "gone"
    assert "process.executable.path" not in old.attributes
    assert new.attributes["process.executable.name"] == "server"


def test_a_process_that_has_exited_keeps_the_data_of_the_sample(proc):
    attributes = resources(proc).get(raw(99, 7 * TICK_NS, comm=b"cc1")).attributes
    assert attributes["process.executable.name"] == "cc1"
    assert "process.creation.time" in attributes


def test_without_start_times_in_samples_proc_distinguishes_reused_pids(proc):
    proc(5, 300)
    found = resources(proc)
    first = found.get(raw(5, None))
    assert found.get(raw(5, None)) is first
    proc(5, 400, exe="/bin/other")
    assert found.get(raw(5, None)) is first  # not read again within a window
    found.next_window()
    assert found.get(raw(5, None)).attributes["process.executable.name"] == "other"


def test_a_kernel_thread_is_named_after_its_thread(proc):
    proc(12, 3, exe="")
    found = resources(proc).get(raw(12, 3 * TICK_NS, comm=b"kworker/0:1"))
    assert found.attributes["process.executable.name"] == "kworker/0:1"


def test_the_creation_time_survives_a_clock_synchronisation(proc):
    class Source:
        offset = 10**18

        def boot_ns(self):
            return 10**12

        def unix_ns(self):
            return 10**12 + self.offset

    source = Source()
    clock = Clock(source)
    found = ProcessResources(Access(proc.root), clock, {}, capacity=1)
    before = found.get(raw(5, 10**10)).attributes["process.creation.time"]
    source.offset += 10**9
    clock.sync()
    found.get(raw(6, 1))  # evicts the first
    assert found.get(raw(5, 10**10)).attributes["process.creation.time"] == before


def test_the_number_of_resources_is_bounded(proc):
    new = []
    found = resources(proc, capacity=2, on_new=lambda key, _: new.append(key.tgid))
    for tgid in (1, 2, 3, 1):
        found.get(raw(tgid, 5))
    assert new == [1, 2, 3, 1]


def test_resources_known_in_advance_are_not_looked_up(proc):
    proc(5, 300)
    known = {ProcessKey(5, 300 * TICK_NS): {"process.pid": 5, "host.name": "elsewhere"}}
    found = resources(proc, known=known)
    assert found.get(raw(5, 300 * TICK_NS)).attributes == known[5, 300 * TICK_NS]


def test_the_own_process_matches_proc():
    with open("/proc/self/stat", "rb") as file:
        ticks = parse_stat(file.read()).start_ticks
    sample = raw(os.getpid(), ticks * TICK_NS + 1)
    attributes = ProcessResources(Access(), Clock(), {}).get(sample).attributes
    assert attributes["process.executable.path"] == os.readlink("/proc/self/exe")


@pytest.mark.parametrize("stat", [b"", b"1 (x", b"1 (x) S 1", b"1 (x) " + b"S " * 30])
def test_a_malformed_stat_line_is_rejected(stat):
    with pytest.raises(ValueError):
        parse_stat(stat)


def test_host_attributes_identify_host_and_kernel(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text("abc\n")
    attributes = read_host_attributes(Access(str(tmp_path)))
    assert attributes["host.id"] == "abc"
    assert attributes["os.version"] == os.uname().release


def test_new_common_attributes_apply_to_every_process(proc):
    found = resources(proc)
    assert "a" not in found.get(raw(42, 10**9)).attributes
    found.rebase({"a": "new"})
    assert found.get(raw(42, 10**9)).attributes["a"] == "new"
