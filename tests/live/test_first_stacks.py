"""The first stacks of running programs are complete, since their tables are preloaded."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from samplers import spawned, started

from otel_kprofiler.host import Access, find_descendants, parse_mappings, read_maps, read_processes
from otel_kprofiler.model import USER_SIDE, StackEnd, parse_user_stack
from otel_kprofiler.sampling import EbpfSampler, HeldCommand, SamplerConfig
from otel_kprofiler.unwinding import list_running
from tests.waiting import wait_until

pytestmark = pytest.mark.live

RECORDINGS = int(os.environ.get("KPROFILER_RECORDINGS", "2"))
SECONDS = 1.0
LEAST_WHOLE = 0.99
BUSY = [sys.executable, "-c", "print(flush=True)\nwhile True: sorted(map(str, range(9999)))"]
"""A program that prints a line after mapping its files."""


def find_mapped_files(pid):
    try:
        return {row.path for row in parse_mappings(read_maps(Access(), pid)) if row.is_executable}
    except OSError:  # the process has exited
        return None


def find_lasting(earlier):
    """Returns the pids in ``earlier`` that still run the same program and map the same files."""
    after = read_processes(Access())
    return {
        pid
        for pid, (process, files) in earlier.items()
        if pid in after
        and process.stack_start == after[pid].stack_start != 0
        and files == find_mapped_files(pid)
    }


def record(pids=(), **options):
    """Records running processes, and returns where their user stacks end."""
    earlier = {
        pid: (process, find_mapped_files(pid)) for pid, process in read_processes(Access()).items()
    }
    config = SamplerConfig(samples_per_second=499, stacks="both", target_pids=pids, **options)
    with started(EbpfSampler(config)) as sampler:
        samples, until = [], time.monotonic() + SECONDS
        # On a busy machine, a process might not be scheduled for a while.
        while time.monotonic() < until or (len(samples) < 50 and time.monotonic() < until + 60):
            sampler.wait(0.1)
            samples += sampler.drain()
        sampler.stop()
        samples += sampler.drain()
    known = find_lasting(earlier)
    words = [sample.words(USER_SIDE) for sample in samples if sample.tgid in known]
    return Counter(parse_user_stack(word).end for word in words if word)


def record_many(**options):
    return sum((record(**options) for _ in range(RECORDINGS)), Counter())


def show(host, ends):
    shown = {end.name.lower(): count for end, count in ends.items()}
    print(f"{RECORDINGS} recordings of {host}: {shown}")  # noqa: T201 - shown by -rP


@pytest.mark.long
def test_stacks_on_an_idle_host_are_complete_from_the_first_sample():
    ends = record_many(max_preload_s=60)  # the host may be busy with other tests
    show("a host as it is", ends)
    assert ends
    assert ends[StackEnd.PENDING] <= (1 - LEAST_WHOLE) * ends.total()


@pytest.mark.long
def test_stacks_on_a_busy_host_are_complete_from_the_first_sample():
    with spawned(sys.executable, "-m", "benchmarks.mixed_load", "600"):
        time.sleep(1)
        ends = record_many()
    show("a busy host", ends)
    assert ends.total() > 100 * RECORDINGS
    assert ends[StackEnd.PENDING] <= (1 - LEAST_WHOLE) * ends.total()


@pytest.fixture
def busy():
    """Runs a process that calls functions in Python, libc and the interpreter. Yields the pid."""
    with spawned(*BUSY, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid


def test_stacks_of_a_single_target_process_are_complete_from_the_first_sample(busy):
    ends = record(pids=(busy,))
    assert ends[StackEnd.COMPLETE] > 10
    assert ends[StackEnd.PENDING] == 0


def test_a_slow_scan_for_mapped_files_leaves_time_to_load_their_tables(busy, monkeypatch):
    def list_slowly(*arguments, until_s, **options):
        time.sleep(max(0, until_s - time.monotonic()))
        return list_running(*arguments, until_s=time.monotonic() + 9, **options)

    monkeypatch.setattr("otel_kprofiler.unwinding.list_running", list_slowly)
    assert record(pids=(busy,), max_preload_s=2)[StackEnd.PENDING] == 0


@pytest.mark.parametrize("knows_files", [True, False])
def test_stacks_of_a_command_are_complete_from_its_first_instruction(knows_files):
    """The first stacks are truncated if the files that a command will map are not preloaded."""
    ends = Counter()
    for _ in range(3):
        with HeldCommand(["bash", "-c", "for ((i = 0; i < 99999; i++)); do :; done"]) as command:
            config = SamplerConfig(
                samples_per_second=999, stacks="both", child_pid=command.pid,
                preload_paths=command.find_files() if knows_files else (),
            )  # fmt: skip
            ends += follow(command, config)
    assert ends[StackEnd.COMPLETE] > 30
    assert (ends[StackEnd.PENDING] == 0) == knows_files


def follow(command, config):
    samples = []
    with started(EbpfSampler(config)) as sampler:
        command.release()
        while command.poll() is None:
            sampler.wait(0.1)
            samples += sampler.drain()
        sampler.stop()
        samples += sampler.drain()
    return Counter(
        parse_user_stack(word).end for sample in samples if (word := sample.words(USER_SIDE))
    )


def test_the_first_stacks_from_a_process_are_truncated_without_preloading(busy):
    assert record(pids=(busy,), max_preload_s=0)[StackEnd.PENDING] > 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_the_first_stacks_of_a_process_are_complete_inside_and_outside_a_pid_namespace():
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*inside, *BUSY], start_new_session=True, stdout=subprocess.PIPE
    ) as outer:
        try:
            outer.stdout.readline()
            (pid,) = find_descendants(read_processes(Access()), [outer.pid])
            assert record(pids=(pid,))[StackEnd.PENDING] == 0
        finally:
            os.killpg(outer.pid, signal.SIGKILL)
    script = "import test_first_stacks as t; print(t.record_own_child()[t.StackEnd.PENDING])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [*inside, sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (result.stdout, result.returncode) == ("0\n", 0), result.stderr


def record_own_child():
    """Records the second process of a PID namespace, from inside the namespace."""
    namespace = os.stat("/proc/self/ns/pid")
    with spawned(*BUSY, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        ends = record(pids=(child.pid,), target_namespace=(namespace.st_dev, namespace.st_ino))
    assert ends[StackEnd.COMPLETE] > 10
    return ends


def find_user_ticks(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_files_mapped_by_processes_with_the_most_cpu_time_are_preloaded_first(monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "otel_kprofiler.unwinding.TableStore.load_early",
        lambda _, requests, __: loaded.extend(request.key.inode for request in requests),
    )
    with (
        spawned("/bin/sleep", "60") as idle,
        spawned("/bin/bash", "-c", "while :; do :; done") as busy,
    ):
        wait_until(lambda: find_user_ticks(busy.pid) > find_user_ticks(idle.pid) + 10)
        record(pids=(idle.pid, busy.pid))
    inodes = [os.stat(path).st_ino for path in ("/bin/bash", "/bin/sleep")]
    assert [inode for inode in loaded if inode in inodes] == inodes
