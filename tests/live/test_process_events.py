"""The stream of process events matches the logs written by test programs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from unwind_maps import compile_c

from otel_kprofiler.host import Access, parse_mappings, read_maps
from otel_kprofiler.tracking import Exec, Exited, Lost, Mapped, ProcessEvents, Started, Unmapped
from otel_kprofiler.tracking.process_events import SETTLE_NS
from otel_kprofiler.tracking.process_table import is_same
from tests.waiting import wait_until

pytestmark = pytest.mark.live

STORM = r"""
    #include <fcntl.h>
    #include <pthread.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/wait.h>
    #include <unistd.h>
    static int file;
    static char *map(char *at, long page, char *before)
    {
        char *got = mmap(at, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | (at ? MAP_FIXED : 0),
                         file, 4096 * page);
        if (got == before)
            dprintf(1, "unmapped %d %lx\n", getpid(), (long)got);
        dprintf(1, "mapped %d %lx\n", getpid(), (long)got);
        return got;
    }
    static void *run(void *unused) { return unused; }
    /* Each step ends before the next one begins, whichever process does it. The pages of the file
       are such that the kernel does not join neighbours. */
    int main(int argc, char **argv)
    {
        int left = atoi(argv[2]);
        char *once, *twice;
        pthread_t thread;
        dprintf(1, "exec %d\n", getpid());
        file = open(argv[1], O_RDONLY | O_CLOEXEC);
        for (int i = 0; i < 3; i++) {
            once = map(0, 0, 0);
            pthread_create(&thread, 0, run, 0);
            twice = map(0, 2 * i, 0);
            map(twice, 9, twice);
            pthread_join(thread, 0);
            if (!fork()) {
                dprintf(1, "started %d\n", getpid());
                munmap(once, 4096);
                twice = map(0, 4, once);
                map(twice, 7, twice);
                dprintf(1, "exited %d\n", getpid());
                _exit(0);
            }
            wait(0);
        }
        if (left) {
            char next[16];
            sprintf(next, "%d", left - 1);
            execl("/proc/self/exe", argv[0], argv[1], next, (char *)0);
        }
        dprintf(1, "exited %d\n", getpid());
        return 0;
    }
"""


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storm")
    data = folder / "data"
    data.write_bytes(bytes(16 * 4096))
    return [compile_c(folder / "storm", STORM, "-pthread"), data]


def describe(event, path):
    """Returns the line that the program should log for an event, or None for ignored events."""
    match event:
        case Started():
            return f"started {event.process.tgid}"
        case Exec():
            return f"exec {event.process.tgid}"
        case Exited():
            return f"exited {event.process.tgid}"
        case Mapped() | Unmapped() if event.mapping.path == str(path):
            kind = type(event).__name__.lower()
            return f"{kind} {event.process.tgid} {event.mapping.start:x}"
    return None


def take(events):
    """Returns the events received so far.

    The kernel writes an event before the system call returns."""
    time.sleep(2 * SETTLE_NS / 1e9)
    return events.poll()


def take_loss(events, storm):
    """Runs a storm that overflows a ring, and returns the storm's events, including the loss.

    The kernel reports a loss with the CPU's next event, so this function triggers one on each CPU.
    """
    subprocess.run([*storm, "20"], stdout=subprocess.DEVNULL, check=True)
    seen = take(events)
    deadline = time.monotonic() + 60
    while not any(isinstance(event, Lost) for event in seen):
        assert time.monotonic() < deadline
        for cpu in os.sched_getaffinity(0):
            subprocess.run(["taskset", "-c", str(cpu), "true"], check=True)
        seen += take(events)
    return seen + take(events)


def family(events, root):
    pids, result = {root}, []
    for event in events:
        if isinstance(event, Lost):
            continue
        if isinstance(event, Started) and event.parent in pids:
            pids.add(event.process.tgid)
        if event.process.tgid in pids:
            result.append(event)
    return result


def test_process_events_are_received_on_descriptors_above_the_select_limit(no_low_descriptors):
    with ProcessEvents([os.getpid()], children=True) as events:
        assert events.fileno() > 1023
        for event in events.follow():
            # initial event for this process
            if isinstance(event, Started) and event.parent is None:
                subprocess.run(["true"])
            if isinstance(event, Exited):
                break


def test_all_process_events_are_reported_in_the_order_logged_by_the_test_programs(storm):
    with ProcessEvents() as events:
        assert any(event.process.tgid == os.getpid() for event in take(events))
        runs = [
            subprocess.Popen([*storm, "5"], stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        seen = []
        while any(run.poll() is None for run in runs):
            time.sleep(0.01)
            seen += events.poll()
        said = [run.communicate()[0].splitlines() for run in runs]
        seen += take(events)
        assert not events.count_lost()
    for run, lines in zip(runs, said, strict=True):
        lines_seen = [describe(event, storm[1]) for event in family(seen, run.pid)]
        assert len(lines) > 150
        assert [line for line in lines_seen if line] == [f"started {run.pid}", *lines]


def test_timestamps_are_ascending_and_mappings_match_the_process(storm):
    code = "import ctypes, sys; ctypes.CDLL('libz.so.1'); print(flush=True); sys.stdin.read()"
    with ProcessEvents() as events:
        taken = events.poll()
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as run:
            run.stdout.readline()
            taken += take(events)
            expected = [
                row
                for row in parse_mappings(read_maps(Access(), run.pid))
                if row.is_executable and row.path != "[vsyscall]"
            ]
            result = events.mappings(run.pid)
            run.stdin.close()
        taken += take(events)
        assert events.mappings(run.pid) == ()
    assert any("libz" in row.path for row in result)
    assert all(is_same(*pair) for pair in zip(result, expected, strict=True))
    times = [event.time_ns for event in taken]
    assert times == sorted(times)


def test_rereading_mappings_detects_unmapped_code():
    code = """
import mmap, os, sys
page = mmap.mmap(os.open(sys.executable, os.O_RDONLY), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
print(flush=True)
sys.stdin.readline()
page.close()
print(flush=True)
sys.stdin.readline()
"""  # noqa: E501
    with (
        ProcessEvents(),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as run,
    ):
        run.stdout.readline()
        with ProcessEvents([run.pid]) as events:
            result = take(events)
            assert {event.process.tgid for event in result} == {run.pid}
            assert isinstance(result[0], Started)
            run.stdin.write(b"\n")
            run.stdout.readline()
            assert not take(events)
            events.refresh(run.pid)
            (gone,) = take(events)
            run.stdin.write(b"\n")
            run.wait()
            (exited,) = take(events)
    assert isinstance(gone, Unmapped)
    assert gone.mapping in [event.mapping for event in result[1:]]
    assert isinstance(exited, Exited)


def test_only_events_from_registered_processes_are_reported(storm):
    with (
        ProcessEvents([os.getpid()]) as events,
        ProcessEvents([os.getpid()], children=True) as all_,
    ):
        take(events)
        take(all_)
        lines = subprocess.check_output([*storm, "0"], text=True).splitlines()
        lines_seen = [describe(event, storm[1]) for event in take(all_)]
        assert [line for line in lines_seen if line and not line.endswith(f" {os.getpid()}")][
            1:
        ] == lines
        assert {event.process.tgid for event in take(events)} <= {os.getpid()}
        with subprocess.Popen(["sleep", "100"]) as run:
            events.add(run.pid)
            assert {event.process.tgid for event in take(events)} >= {run.pid}
            events.discard(run.pid)
            run.kill()
        assert not any(event.process.tgid == run.pid for event in take(events))


@contextlib.contextmanager
def family_of_three():
    script = "sh -c 'sleep 100 & echo $$ $!; wait' & wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            yield [run.pid, *map(int, run.stdout.readline().split())]
        finally:
            os.killpg(run.pid, signal.SIGKILL)


def pids_of(events):
    return {event.process.tgid for event in events}


def test_existing_child_processes_are_reported():
    with family_of_three() as pids:
        with ProcessEvents(pids[:1], children=True) as events:
            assert pids_of(take(events)) == {*pids}
            assert any("sleep" in mapping.path for mapping in events.mappings(pids[2]))
        with ProcessEvents(pids[:1]) as events:
            assert pids_of(take(events)) == {pids[0]}
        with ProcessEvents([os.getpid()], children=True) as events, family_of_three() as new:
            assert pids_of(take(events)) >= {os.getpid(), *pids, *new}
        with ProcessEvents([2**22 - 1], children=True) as events:
            take(events)
            events.add(pids[1])
            assert pids_of(take(events)) == {*pids[1:]}


def test_child_processes_started_while_records_are_lost_are_reported(storm):
    with ProcessEvents([os.getpid()], children=True, ring_bytes=4096) as events:
        take(events)
        with family_of_three() as pids:
            seen = take_loss(events, storm)
            assert pids_of(event for event in seen if isinstance(event, Started)) >= {*pids}


def list_pids():
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def test_all_processes_are_reread_after_records_are_lost(storm):
    with ProcessEvents(ring_bytes=4096) as events:
        take(events)
        run = subprocess.Popen(["sleep", "100"])
        seen = take_loss(events, storm)
        assert events.count_lost()["ring_full"] >= 1
        assert [
            event for event in seen if isinstance(event, Started) and event.process.tgid == run.pid
        ]
        assert any("sleep" in mapping.path for mapping in events.mappings(run.pid))
        # If more events are lost, the loss is reported with the next event on that CPU.
        wait_until(lambda: agrees_with_host(events))
        assert run.pid in events._table.pids()
        run.kill()
        run.wait()


def agrees_with_host(events):
    """Returns whether the table matches the host's processes, except a few that start or exit."""
    earlier = list_pids()
    take(events)
    pids = set(events._table.pids())
    later = list_pids()
    return earlier & later <= pids and len(pids - earlier - later) < 20


def test_a_process_discovered_while_it_starts_is_reported_once(storm):
    stop = threading.Event()
    started = []

    def start():
        while not stop.is_set():
            started.append(subprocess.Popen(["sleep", "3"]))
            time.sleep(0.005)

    thread = threading.Thread(target=start)
    thread.start()
    time.sleep(0.1)
    with ProcessEvents() as events:
        time.sleep(0.1)
        stop.set()
        thread.join()
        seen = take(events)
        for run in started:
            run.kill()
            run.wait()
        seen += take(events)
    for run in started:
        own = [event for event in seen if event.process.tgid == run.pid]
        kinds = [type(event) for event in own]
        assert kinds.count(Started) == kinds.count(Exited) == 1, own
        assert (kinds[0], kinds[-1]) == (Started, Exited)
        places = [event.mapping[:2] for event in own if isinstance(event, Mapped)]
        programs = [e for e in own if isinstance(e, Mapped) and e.mapping.path.endswith("/sleep")]
        assert len(programs) == 1
        assert len(places) - len(set(places)) == 0 or Exec in kinds


def test_a_forked_child_receives_no_process_events():
    with ProcessEvents() as events:
        if not (child := os.fork()):
            os._exit(events.poll() != [])
        assert os.waitpid(child, 0)[1] == 0
        assert events.poll()
    assert events.poll() == []
