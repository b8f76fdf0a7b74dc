"""The addresses found in CPython processes match those that the processes report."""

import contextlib
import mmap
import select
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
from samplers import spawned
from unwind_maps import compile_c

from otel_kprofiler.host import Access, parse_mappings, read_maps
from otel_kprofiler.interpreters import PythonProcesses, PythonTracking, open_own
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from tests.further import further_of
from tests.interpreters import VERSIONS, Journal, environment, find_pythons, require_pythons
from tests.waiting import wait_until

pytestmark = pytest.mark.live

# Prints its pid and the address of its _PyRuntime, then executes the command on each input line.
PROGRAM = """
import ctypes, os, select, sys
def report():
    at = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    os.write(1, b"%d %d\\n" % (os.getpid(), at))
def read():
    line = b""
    while not line.endswith(b"\\n"):
        while not select.select([0], [], [], 0)[0]:
            pass  # sampled
        line += os.read(0, 1) or os._exit(0)
    return line.strip()
report()
while True:
    line = read()
    if line != b"fork":
        os.execv(line, [line, *sys.orig_argv[-2:]])
    if not os.fork():
        report()
        over = select.poll()
        over.register(0, 0)
        while not over.poll(0):
            pass
        os._exit(0)
"""

# Maps a file as executable when it reads a line.
LOADS = r"""
    #include <fcntl.h>
    #include <poll.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    int main(int argc, char **argv)
    {
        struct pollfd commands = {0, POLLIN, 0};
        int file = open(argv[1], O_RDONLY);
        while (!poll(&commands, 1, 0))
            ;
        mmap(0, atol(argv[3]), PROT_READ | PROT_EXEC, MAP_PRIVATE, file, atol(argv[2]));
        for (;;)
            ;
    }
"""
# Maps and unmaps code until standard input is closed.
CHANGES = r"""
    #include <poll.h>
    #include <sys/mman.h>
    int main(void)
    {
        struct pollfd over = {0, 0, 0};
        for (unsigned long bytes = 4096; !poll(&over, 1, 0); bytes = bytes % 65536 + 4096) {
            void *at = mmap(0, bytes, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            munmap(at, bytes / 8192 * 4096);
        }
    }
"""


class Target:
    def __init__(self, command):
        self._process = subprocess.Popen(
            [command, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip
        self.pid = self._process.pid

    @property
    def is_running(self):
        return self._process.poll() is None

    def heard(self):
        pid, at = self._process.stdout.readline().split()
        return int(pid), int(at)

    def send(self, line):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end(self):
        """Stops the target; the target's child then reads EOF and exits."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def start():
    targets = []

    def start_target(command=sys.executable):
        targets.append(Target(command))
        return targets[-1]

    yield start_target
    for target in targets:
        target.end()


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("changes") / "changes", CHANGES)


@contextmanager
def tracked(**options):
    """Runs a sampler with Python tracking during the block, and yields the registered processes."""
    config = SamplerConfig(samples_per_second=999, python_frames=1, stacks="both", **options)
    with closing(EbpfSampler(config)) as sampler:
        sampler.start()
        journal = Journal(registry=sampler.python)
        with closing(PythonTracking(journal)) as tracking:
            tracking.start()
            yield journal


def is_registered(journal, pid, runtime):
    return pid in journal.now and journal.now[pid][1].runtime_at == runtime


@pytest.mark.parametrize("minor", further_of(VERSIONS, ("3.11",)))
def test_python_processes_are_tracked_as_they_start_fork_and_exit(start, minor):
    with tracked() as journal:
        for python in require_pythons(minor):
            target = start(python.command)
            pid, runtime = target.heard()
            wait_until(lambda: is_registered(journal, pid, runtime))  # noqa: B023
            target.send("fork")
            child, runtime = target.heard()
            wait_until(lambda: is_registered(journal, child, runtime))  # noqa: B023
            target.end()
            wait_until(lambda: not {pid, child} & journal.now.keys())  # noqa: B023


def test_python_processes_already_running_are_detected(start):
    target = start()
    pid, runtime = target.heard()
    with tracked() as journal:
        wait_until(lambda: is_registered(journal, pid, runtime))


def test_an_interpreter_started_by_exec_is_detected(start, changes):
    with tracked() as journal:
        pythons = find_pythons()
        target = start(pythons[0].command)
        for python in (*pythons[1:], pythons[0]):
            pid, runtime = target.heard()
            wait_until(lambda: is_registered(journal, pid, runtime))  # noqa: B023
            target.send(python.command)
        pid, runtime = target.heard()
        wait_until(lambda: is_registered(journal, pid, runtime))
        target.send(changes)
        wait_until(lambda: pid not in journal.now)
        assert target.is_running


def test_an_interpreter_loaded_after_startup_is_detected(tmp_path):
    own = open_own()
    text = own.interpreter.texts[0]
    offset = text.offset & ~4095
    program = compile_c(tmp_path / "loads", LOADS)
    path = next(
        mapping.path
        for mapping in parse_mappings(read_maps(Access(), "self"))
        if mapping.is_executable and mapping.inode == own.file.inode
    )
    command = [program, path, str(offset), str(text.offset + text.size - offset)]
    with tracked() as journal, spawned(*command, stdin=subprocess.PIPE) as run:
        time.sleep(0.5)
        assert run.pid not in journal.now
        run.stdin.write(b"load")
        run.stdin.flush()
        wait_until(lambda: run.pid in journal.now)


def test_only_target_processes_and_their_descendants_are_detected(start):
    process, other = start(), start()
    other.heard()
    process.heard()
    process.send("fork")
    before, _ = process.heard()
    with tracked(target_pids=(process.pid,), target_descendants=True) as journal:
        wait_until(lambda: {process.pid, before} <= journal.now.keys())
        process.send("fork")
        after, runtime = process.heard()
        wait_until(lambda: is_registered(journal, after, runtime))
        assert {tgid for tgid, *_ in journal.all} == {process.pid, before, after}


def test_a_polling_thread_is_woken_if_another_thread_calls_receive():
    config = SamplerConfig(samples_per_second=99, python_frames=1, stacks="both")
    waiting = select.poll()
    with closing(EbpfSampler(config)) as sampler:
        sampler.start()
        waiting.register(sampler.python.fileno(), select.POLLIN)
        assert waiting.poll(60_000)
        sampler.python.receive()  # as the thread that drains samples does
        assert waiting.poll(0)
        assert sampler.python.take_seen()


def test_a_process_that_keeps_mapping_code_is_reported_at_increasing_intervals(changes):
    config = SamplerConfig(samples_per_second=999, python_frames=1, stacks="both")
    with (
        closing(EbpfSampler(config)) as sampler,
        subprocess.Popen([changes], stdin=subprocess.PIPE) as run,
    ):
        sampler.start()
        seen, started = [], time.monotonic()
        while len(seen) < 2 or time.monotonic() < started + 2:
            time.sleep(0.1)
            seen += [process for process in sampler.python.take_seen() if process.tgid == run.pid]
        run.stdin.close()
    assert len(seen) < 12


def test_each_program_without_an_interpreter_is_reported_at_most_once_a_minute(start, tmp_path):
    config = SamplerConfig(samples_per_second=999, python_frames=1, stacks="both")
    spins = compile_c(tmp_path / "spins", "int main(void) { for (;;); }")
    with closing(EbpfSampler(config)) as sampler, contextlib.ExitStack() as ends:
        sampler.start()
        seen = {}

        def see():
            seen.update((process.tgid, process) for process in sampler.python.take_seen())

        def spin():
            run = ends.enter_context(subprocess.Popen([spins]))
            ends.callback(run.kill)
            return run.pid

        def is_whole():
            see()
            code = [
                mapping
                for mapping in parse_mappings(read_maps(Access(), first), only_code=True)
                if mapping.permissions == "r-xp"
            ]
            paths = [one.path for one in code]
            if str(spins) not in paths or not any("/libc." in path for path in paths):
                return False  # execve(2) or the last mmap(2) is still pending
            pages = sum(one.end - one.start for one in code) // mmap.PAGESIZE
            return first in seen and seen[first].program == (code[0].device, code[0].inode, pages)

        first = spin()
        wait_until(is_whole)
        journal = Journal(registry=sampler.python)
        PythonProcesses(journal, Access()).inspect(seen[first])
        assert journal.passed_over == [seen[first].program]
        second, python = spin(), start()
        wait_until(lambda: see() or python.pid in seen)
        time.sleep(0.5)
        see()
        whole = seen[first].program
        # reported before all of its code was mapped
        if second in seen and seen[second].program.inode == whole.inode:
            assert seen[second].program.code_pages < whole.code_pages


def test_tracking_can_be_closed_without_being_started():
    PythonTracking(Journal()).close()
