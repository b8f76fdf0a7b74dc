"""``dump`` shows what threads are doing, as reported by the programs themselves."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unwind_maps import compile_c

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE
from otel_kprofiler.pipeline import ThreadDumper, open_resources, open_symbols
from otel_kprofiler.sampling import SamplerConfig
from tests.commands import run_checked, run_command
from tests.fuse import mounted
from tests.needs import LIBBPF, ROOT, X86_64
from tests.public import NOBODY, TWO, as_nobody
from tests.waiting import wait_until

pytestmark = [pytest.mark.live, LIBBPF, X86_64]
SOURCE = Path(__file__).with_name("threads_at_rest.c")
PYTHON = """
import os, threading, time
def leaf(until):
    until.acquire()
def middle(until):
    leaf(until)
def rest(until):
    middle(until)
def spin():
    while True:
        pass
def tick():
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as name:
        name.write("dump-by-name")
    while True:
        time.sleep(0.01)
def read_state(thread):
    with open(f"/proc/self/task/{{thread.native_id}}/status") as status:
        return [line for line in status if "ctxt_switches" in line or line.startswith("State")]
resting = []
for _ in range({resting}):
    held = threading.Lock()
    held.acquire()
    resting.append(threading.Thread(target=rest, args=(held,), daemon=True))
    resting[-1].start()
before = None
while (now := list(map(read_state, resting))) != before or any("R" in state[0] for state in now):
    before = now
    time.sleep(0.1)
for work in {others}:
    threading.Thread(target=work, daemon=True, name=work.__name__).start()
print("ready", flush=True)
time.sleep(1000)
"""


SPAN = """
import time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import thread_context
trace.set_tracer_provider(TracerProvider())
thread_context.start()
with trace.get_tracer("shop").start_as_current_span("pay") as span:
    print(format(span.get_span_context().span_id, "016x"))
    print("ready", flush=True)
    time.sleep(1000)
"""
LOCKED = """
import mmap, os, sys, threading, time
path = sys.argv[1]
def read_page():
    os.read(os.open(path, os.O_RDONLY), 4096)
def map_page():
    mmap.mmap(os.open(path, os.O_RDONLY | os.O_SYNC), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)
reader = threading.Thread(target=read_page, daemon=True)
reader.start()
def find_state():
    return open(f"/proc/self/task/{reader.native_id}/stat").read().rpartition(")")[2].split()[0]
while find_state() != "D":
    time.sleep(0.01)
print("ready", flush=True)
map_page()
"""


HELD_OFF = """
import _thread, os, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
print("ready", flush=True)
input()
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
_thread.start_new_thread(time.sleep, (60,))
end = time.monotonic() + 10
while time.monotonic() < end:
    pass
"""


@contextlib.contextmanager
def dumping(*pids):
    """Yields a dumper of these processes, without user names."""
    access, clock = Access(), Clock()
    dumper = ThreadDumper(
        SamplerConfig(target_pids=tuple(sorted(pids))),
        access=access, clock=clock, symbolizer=open_symbols(access),
        resources=open_resources(access, clock, {}), user_names=None,
    )  # fmt: skip
    with contextlib.closing(dumper):
        yield dumper


@contextlib.contextmanager
def running(*command):
    """Runs a program in a new process group; yields its pid, and its output up to "ready"."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            lines = []
            while (line := process.stdout.readline()) != "ready\n":
                assert line, "the program has ended"
                lines.append(line)
            yield process.pid, lines
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def python(resting, others=""):
    return [sys.executable, "-c", PYTHON.format(resting=resting, others=f"({others})")]


def dump(pid, *options):
    """Returns the threads that ``dump`` shows, each with its stack, leaf first."""
    document = json.loads(run_checked("dump", "-p", pid, "-f", "json", *options).stdout)
    threads = [thread for process in document["processes"] for thread in process["threads"]]
    for thread in threads:
        thread["frames"] = document["stacks"][thread["stack"]]
    return threads


def wait_until_at_rest(pid):
    """Waits until no thread is runnable or has run between two readings, 0.1 s apart."""
    statuses = [task / "status" for task in Path(f"/proc/{pid}/task").iterdir()]
    before, now = None, list(map(read_state, statuses))
    while now != before or any("R" in state[0] for state in now):
        time.sleep(0.1)
        before, now = now, list(map(read_state, statuses))


def read_state(status):
    """Returns the lines with a thread's state and its context switches."""
    return re.findall(r".*(?:State|ctxt_switches).*", status.read_text())


def functions(thread, side):
    return [frame["function"] for frame in thread["frames"] if frame["side"] == side]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "threads_at_rest"
    # Without frame pointers, as Debian builds its programs.
    return compile_c(path, SOURCE.read_text(), "-O2", "-fomit-frame-pointer", "-pthread")


@pytest.fixture(scope="module")
def resting(program):
    with running(program, "3") as (pid, lines):
        wait_until_at_rest(pid)
        said = {int(tid): (cause, chain) for tid, cause, *chain in map(str.split, lines)}
        assert len(said) == 4 * 3 + 1
        yield pid, said


def test_the_dump_shows_the_stack_and_wait_cause_that_each_thread_reported(resting):
    pid, said = resting
    threads = {thread["tid"]: thread for thread in dump(pid)}
    assert threads.keys() == {pid, *said}
    for tid, (cause, chain) in said.items():
        thread = threads[tid]
        user = functions(thread, "user")
        at = user.index(chain[0])
        assert (thread["cause"], user[at : at + 3]) == (cause, chain), thread
        assert user[at + 3 :] in (["start_thread", "clone3"], ["start_thread", "clone"])
        assert functions(thread, "kernel")[-1].startswith("entry_SYSCALL_64")
    assert threads[pid]["cause"] == "signal"
    assert functions(threads[pid], "user")[:2] == ["pause", "main"]


def test_the_stack_of_a_thread_in_an_uninterruptible_wait_is_dumped(resting):
    pid, said = resting
    (parent,) = (tid for tid, (cause, _) in said.items() if cause == "child")
    assert "State:\tD" in Path(f"/proc/{pid}/task/{parent}/status").read_text()
    thread = next(thread for thread in dump(pid) if thread["tid"] == parent)
    assert thread["state"] == "uninterruptible"
    assert "kernel_clone" in functions(thread, "kernel")


@pytest.mark.long
def test_a_process_stuck_holding_its_mmap_lock_is_dumped(tmp_path):
    """Reading the process's memory or mappings would wait forever for its mmap_lock."""
    with mounted(tmp_path / "server", {"file": bytes(1 << 16)}) as fuse:
        fuse.freeze("read", delay_s=120)  # the delay is limited, because ``ps`` also blocks
        with running(sys.executable, "-c", LOCKED, fuse.point / "file") as (pid, _):
            try:
                while "State:\tD" not in Path(f"/proc/{pid}/status").read_text():
                    time.sleep(0.01)
                threads = dump(pid)
                run_checked("record", "-p", pid, "-d", "1s", "-o", tmp_path / "empty.otlp")
                assert fuse.count_held() > 0
            finally:
                fuse.thaw()
    shown = {function for thread in threads for function in functions(thread, "python")}
    assert {"read_page", "map_page"} <= shown
    mapper = next(t for t in threads if "map_page" in functions(t, "python"))
    assert mapper["state"] == "uninterruptible"
    assert "fuse_file_mmap" in functions(mapper, "kernel")
    assert functions(mapper, "user")[-1] == "_start"
    assert next(t for t in threads if "read_page" in functions(t, "python"))["cause"] == "disk"


def test_the_duration_of_a_wait_matches_the_programs_sleep():
    code = "import time; print(time.monotonic_ns()); print('ready', flush=True); time.sleep(999)"
    with running(sys.executable, "-c", code) as (pid, (began,)):
        wchan = Path(f"/proc/{pid}/wchan")
        wait_until(lambda: "nanosleep" in wchan.read_text())
        asleep = time.monotonic_ns()
        time.sleep(0.5)
        earliest = time.monotonic_ns()
        (thread,) = dump(pid)
        latest = time.monotonic_ns()
    waited = thread["waited_seconds"] * 1e9
    assert earliest - asleep < waited < latest - int(began)


def test_dumped_python_frames_have_line_numbers():
    with running(*python(2)) as (pid, _):
        resting = [thread for thread in dump(pid) if thread["tid"] != pid]
    assert len(resting) == 2
    for thread in resting:
        frames = [frame for frame in thread["frames"] if frame["side"] == "python"]
        assert [(frame["function"], frame["line"]) for frame in frames[:3]] == [
            ("leaf", 4), ("middle", 6), ("rest", 8),
        ]  # fmt: skip
        assert frames[-1]["function"] == "Thread._bootstrap"
        assert thread["cause"] == "futex"


def test_each_dumped_thread_has_its_current_span():
    with running(sys.executable, "-c", SPAN) as (pid, (span_id,)):
        threads = dump(pid)
    assert {t["tid"]: t["span_id"] for t in threads if t["span_id"]} == {pid: span_id.strip()}


def test_the_stack_of_a_running_thread_is_dumped():
    with running(*python(0, "spin,")) as (pid, _):
        (thread,) = [thread for thread in dump(pid) if thread["tid"] != pid]
    assert thread["state"] in ("running", "runnable")
    assert functions(thread, "python")[0] == "spin"
    assert functions(thread, "user")[-2:] == ["start_thread", "clone3"]


def test_a_second_dump_shows_which_threads_have_moved():
    with running(*python(1, "tick,")) as (pid, _):
        has_ticked = False
        while not has_ticked:  # a busy machine might not run the thread in the interval
            threads = dump(pid, "--interval", "0.5s")
            stuck = [t for t in threads if "leaf" in functions(t, "python")]
            assert [t["moved"] for t in stuck] == [False]
            has_ticked = any(t["moved"] for t in threads if t["tid"] not in (pid, stuck[0]["tid"]))


def test_threads_to_dump_are_selected_by_name():
    with running(*python(1, "tick,")) as (pid, _):
        tasks = Path(f"/proc/{pid}/task")
        named = wait_until(
            lambda: [
                int(task.name)
                for task in tasks.iterdir()
                if (task / "comm").read_text() == "dump-by-name\n"
            ]
        )
        done = run_checked("dump", "--comm", "dump-by-name", "-f", "json")
    (process,) = json.loads(done.stdout)["processes"]
    assert [thread["tid"] for thread in process["threads"]] == named


def test_an_exited_process_is_omitted_and_other_processes_are_dumped():
    code = "print('ready', flush=True); input()"
    with (
        running(sys.executable, "-c", code) as (pid, _),
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as other,
        dumping(pid, other.pid) as dumper,
    ):
        both = [process.tgid for process in dumper.dump()]
        other.communicate(b"\n")
        left = [process.tgid for process in dumper.dump()]
    assert (both, left) == (sorted((pid, other.pid)), [pid])


def kernel_frames(thread):
    return [frame for frame in thread.stack.frames if frame.side is KERNEL_SIDE]


@ROOT
def test_each_kernel_frame_of_a_sleeping_thread_lies_in_the_call_to_the_next(resting):
    """``/proc/PID/task/TID/stack`` shows return addresses."""
    pid, _ = resting
    with dumping(pid) as dumper:
        (process,) = dumper.dump()
    for thread in process.threads:
        lines = Path(f"/proc/{pid}/task/{thread.tid}/stack").read_text().splitlines()
        returns = [int(re.search(r"\+(0x\w+)/", line)[1], 16) for line in lines]
        assert [frame.offset for frame in kernel_frames(thread)] == [one - 1 for one in returns]


@ROOT
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_thread_that_has_never_run_is_at_the_start_of_its_first_function():
    """The program occupies its only CPU in real-time priority, so its new thread does not run."""
    with running(sys.executable, "-c", HELD_OFF) as (pid, _), dumping(pid) as dumper:
        with open(f"/proc/{pid}/fd/0", "w") as words:
            words.write("\n")
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) > 1)
        (process,) = dumper.dump()
    (thread,) = (thread for thread in process.threads if thread.tid != pid)
    assert thread.switches == 0
    (frame,) = kernel_frames(thread)
    assert frame.function.startswith("ret_from_fork")
    assert frame.offset == 0


def test_each_of_two_thousand_threads_is_dumped_with_its_frames(program):
    """200 of the threads wait in Python code. ``pytest -rP`` shows how long the dump took."""
    with running(program, "450") as (pid, lines), running(*python(200)) as (other, _):
        wait_until_at_rest(pid)
        began = time.monotonic()
        threads = dump(pid, "-p", str(other))
        print(f"{len(threads):,} threads in {time.monotonic() - began:.2f} s")  # noqa: T201
    said = {int(tid): (cause, chain) for tid, cause, *chain in map(str.split, lines)}
    assert len(threads) == 1802 + 201
    assert len({thread["stack"] for thread in threads}) <= 12
    for thread in threads:
        if chain := said.get(thread["tid"]):
            user = functions(thread, "user")
            at = user.index(chain[1][0])
            assert (thread["cause"], user[at : at + 3]) == chain
        elif thread["tid"] not in (pid, other):
            assert functions(thread, "python")[:3] == ["leaf", "middle", "rest"]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_two_capabilities_suffice_to_dump_the_same_users_processes(public_python):
    code = "import time; print('ready', flush=True); time.sleep(999)"
    with running(*NOBODY, *public_python.words, "-c", code) as (pid, _):
        wchan = Path(f"/proc/{pid}/wchan")
        wait_until(lambda: "nanosleep" in wchan.read_text())
        for rights, status in ((TWO, 0), ((), 3)):
            by = [*as_nobody(*rights), *public_python.words]
            done = run_command("dump", "-p", pid, "-f", "json", by=by, cwd=public_python.root)
            assert done.returncode == status, done.stderr
            if status:
                assert "CAP_BPF and CAP_PERFMON missing" in done.stderr
                continue
            document = json.loads(done.stdout)
            (thread,) = document["processes"][0]["threads"]
            frames = document["stacks"][thread["stack"]]
            assert thread["cause"] == "sleep"
            assert [f["line"] for f in frames if f["side"] == "python"] == [1]
