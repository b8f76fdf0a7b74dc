"""For every way to start a service, its samples have Python frames or a reason is logged once."""

import os
import textwrap
from contextlib import closing

import pytest
from python_frames import LAYOUT, PROCESS, sampling, take
from samplers import spawned
from services import run
from unwind_maps import compile_c

from otel_kprofiler.host import Access
from otel_kprofiler.model import KnownLoops
from otel_kprofiler.pipeline.python_frames import PythonFrames
from tests.commands import run_command

pytestmark = pytest.mark.live

STARTS = int(os.environ.get("KPROFILER_STARTS", "2"))
# Threads compute, wait, start and exit, even before the profiler starts.
SERVICE = textwrap.dedent(
    """
    import os, threading, time
    from otel_kprofiler import KernelProfiler

    def starts():
        while True:
            short = threading.Thread(target=sum, args=(range(2000),))
            short.start()
            short.join()

    def serves():
        while True:
            sum(number * number for number in range(3000))
            time.sleep(0.002)

    for target in (serves, serves, starts, starts):
        threading.Thread(target=target, daemon=True).start()
    profiler = KernelProfiler.from_env().start("raise")
    deadline, found = time.monotonic() + 20, {}
    while not found.get("stacks", {}).get("complete") and time.monotonic() < deadline:
        time.sleep(0.05)
        found = profiler.stats()["python_frames"]
        if found["problem"]:
            break
    print(found["problem"] or ("none" if time.monotonic() > deadline else "frames"), flush=True)
    profiler.stop()
    os._exit(0)
    """
)
ENVIRONMENT = {
    "OTEL_PROFILES_EXPORTER": "otlp_json_file",
    "OTEL_KPROFILER_STACKS": "both",
    "OTEL_KPROFILER_OFF_CPU": "on",
    "OTEL_KPROFILER_SAMPLES_PER_SECOND": "99",
}
# Uses seccomp(2) to make process_vm_readv(2) fail with EPERM, as some container profiles do.
REFUSED = """
import ctypes, struct
code = struct.pack("=HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 310,
                   6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("=HxxxxxxQ", 4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


def start(code, directory):
    return run(
        code, env={**ENVIRONMENT, "OTEL_KPROFILER_FILE": f"{directory}/profiles.jsonl"}, timeout=60
    )


@pytest.mark.long
@pytest.mark.timeout(60 + 20 * STARTS)
def test_python_frames_are_recorded_however_python_is_started(tmp_path):
    for number in range(STARTS):
        done = start(SERVICE, tmp_path)
        assert done.stdout.split() == ["frames"], (number, done.stdout, done.stderr)


def test_a_service_whose_interpreter_is_rejected_logs_the_reason_once(tmp_path):
    done = start(REFUSED + SERVICE, tmp_path)
    assert done.stderr.count("stacks will have no Python frames") == 1, done.stderr
    assert "Operation not permitted" in done.stderr


def test_a_service_warns_about_missing_python_frames_only_once(caplog):
    def work():
        os.listdir("/proc/self/task")

    with sampling(register=False) as sampler:
        with closing(PythonFrames(sampler, Access(), KnownLoops())) as frames:
            frames.start()
            sampler.python.register(os.getpid(), LAYOUT, PROCESS, image=1)  # a different program
            take(sampler, work, least=40)
            frames.look()
            frames.look()
        assert caplog.text.count("no stack has Python frames so far (other_image ") == 1


OTHER_VERSION = 'char _PyRuntime[4096] = "other"'
FREE_THREADED = """struct { char cookie[8]; unsigned long version, free_threaded, offsets[510]; }
    _PyRuntime = {"xdebugpy", 0x030e00f0, 1}"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (OTHER_VERSION, "a CPython version other than"),
        (FREE_THREADED, "a free-threaded build of CPython"),
    ],
    ids=["version", "free-threaded"],
)
def test_record_and_top_report_processes_without_python_frames(tmp_path, runtime, reason):
    """The executable contains CPython's ``.PyRuntime`` section, but with invalid content."""
    program = compile_c(
        tmp_path / "python3.1",
        f"""
        __attribute__((section(".PyRuntime"))) {runtime};
        int main(void) {{ for (;;); }}
        """,
    )
    with spawned(program) as run:
        for words in (
            ["record", "-p", run.pid, "-d", "5s", "-o", tmp_path / "x.folded"],
            ["top", "-p", run.pid, "--once", "--window", "5s"],
        ):
            done = run_command(*words)
            said = done.stdout + done.stderr
            assert f"no Python frames for {program}: {reason}" in said
            assert f"Python frames of 1 process not read: {reason}" in said
