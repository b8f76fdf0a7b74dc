"""``record`` and profiled services show which Python lines cause kernel time."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import dropwhile

import pytest
from planted import HOT, write_program
from services import ask

from otel_kprofiler.model import KERNEL_SIDE, PYTHON_SIDE, USER_SIDE
from tests.commands import COMMAND, run_checked
from tests.further import further
from tests.windows import read_stacks

pytestmark = pytest.mark.live

RATE = ("-F", "499")
SECONDS = "3"
"""CPU time of the program, in seconds; a busy machine may delay reading interpreter frames."""


@pytest.fixture
def program(tmp_path):
    return tmp_path / "shop.py"


@pytest.fixture
def hot_line(program):
    return write_program(program)


def record(path, *words):
    run_checked("record", "-o", path, *words)
    return read_stacks(path)


def innermost_lines(stacks, entry="getdents64"):
    """Counts the innermost Python lines in samples from a system call, after startup imports."""
    lines = [
        next((frame.lines for frame in stack.frames if frame.side is PYTHON_SIDE), None)
        for stack in stacks
        if any(entry in frame.function for frame in stack.frames)
    ]
    return Counter(dropwhile(lambda result: not result or result[0].file.startswith("<"), lines))


def check_hot_line(stacks, program, hot_line):
    """Checks that stacks in the system call contain the hot line and few lack Python frames."""
    lines = innermost_lines(stacks)
    missing = lines.pop(None, 0)
    (((line,), count),) = lines.items()
    assert (line.function, line.file, line.line) == (f"step_{HOT}", str(program), hot_line)
    assert line.start_line == hot_line - 2
    assert count > 20
    assert missing <= max(3, count // 20)


@pytest.mark.long
def test_record_shows_which_line_causes_kernel_time(program, hot_line, tmp_path):
    command = [*RATE, "--", sys.executable, program, SECONDS]
    stacks = record(tmp_path / "x.otlp", "--stacks", "kernel", *command)
    check_hot_line(stacks, program, hot_line)
    kinds = {tuple(side.kind for side in stack.sides) for stack in stacks}
    assert kinds <= {(KERNEL_SIDE, PYTHON_SIDE), (KERNEL_SIDE,)}


@pytest.fixture(scope="module", params=["names", *further("off")])
def recorded(request, tmp_path_factory):
    """Records the program, and returns the stacks, the recording, the program and its hot line."""
    directory = tmp_path_factory.mktemp("recorded")
    program, raw = directory / "shop.py", directory / "x.raw"
    line = write_program(program)
    words = ["--user-symbols", request.param, "--stacks", "both", "--raw", raw, *RATE]
    command = ["--", sys.executable, program, SECONDS]
    return record(directory / "x.otlp", *words, *command), raw, (program, line)


def test_native_frames_appear_where_python_called_them(recorded):
    stacks, _, expected = recorded
    check_hot_line(stacks, *expected)
    called_back = Counter()
    for stack in stacks:
        names = [frame.function for frame in stack.frames if frame.side is PYTHON_SIDE]
        if names[:2] == [f"step_{HOT}", "sub"]:
            kinds = [side.kind for side in stack.sides if side.kind is not KERNEL_SIDE]
            while kinds[:1] == [USER_SIDE]:
                kinds.pop(0)  # frames of functions that ``sub`` called
            called_back[tuple(kinds[:3])] += 1
    most, count = called_back.most_common(1)[0]
    assert most == (PYTHON_SIDE, USER_SIDE, PYTHON_SIDE), "re.sub is C code between them"
    assert count > called_back.total() * 0.8


def test_a_replay_shows_the_stacks_and_lines_in_the_recording(recorded, tmp_path):
    """The replay uses only the recording, and interleaves Python frames with native frames.

    A replay must recognize the interpreter's loop, so recordings always name the loop.
    """
    stacks, raw, expected = recorded
    replayed = record(tmp_path / "y.otlp", "--replay", raw)
    assert shown(replayed) == shown(stacks)
    check_hot_line(replayed, *expected)


def shown(stacks):
    def lines(frame):
        return () if frame.function.startswith("_PyEval_EvalFrameDefault") else frame.lines

    return Counter(tuple((frame.side, lines(frame)) for frame in stack.frames) for stack in stacks)


def test_python_frames_can_be_disabled(program, hot_line, tmp_path):
    command = ["--", sys.executable, program, "0.5"]
    stacks = record(tmp_path / "x.otlp", "--no-python", *RATE, *command)
    assert stacks
    assert not has_python_frames(stacks)


def has_python_frames(stacks):
    return any(side.kind is PYTHON_SIDE for stack in stacks for side in stack.sides)


SERVICE = """
import json, sys
sys.path.insert(0, {directory!r})
import shop
from otel_kprofiler import KernelProfiler
profiler = KernelProfiler.from_env()
profiler.start(on_error="raise")
shop.main(1.5)
print(json.dumps(profiler.stats()["python_frames"]))
profiler.stop()
"""


@pytest.mark.parametrize("frames", ["", "off"])
def test_a_service_records_its_python_lines_unless_disabled(program, hot_line, tmp_path, frames):
    path = tmp_path / "x.otlp.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SERVICE.format(directory=str(tmp_path))],
        env={
            **os.environ,
            "OTEL_PROFILES_EXPORTER": "otlp_json_file",
            "OTEL_KPROFILER_FILE": str(path),
            "OTEL_KPROFILER_SAMPLES_PER_SECOND": "499",
            "OTEL_KPROFILER_PYTHON_FRAMES": frames,
        },
        check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    state = json.loads(done.stdout)
    stacks = read_stacks(path)
    if frames:
        assert state["problem"] == "python_frames is 0"
        assert not has_python_frames(stacks)
    else:
        assert state["problem"] == ""
        assert state["stacks"]["complete"] > 20
        check_hot_line(stacks, program, hot_line)


APP = """

def app(environ, start_response):
    handle()
    start_response("200 OK", [])
    return [b"done"]
"""


@pytest.mark.long
def test_report_lists_the_hot_line_of_a_gunicorn_service_first(program, hot_line, tmp_path):
    program.write_text(program.read_text().replace("\n\nif __name__", f"{APP}\n\nif __name__"))
    path, place = tmp_path / "x.otlp", tmp_path / "socket"
    service = [
        sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"unix:{place}",
        "--chdir", tmp_path, "shop:app",
    ]  # fmt: skip
    command = ["-d", "8s", "-F", "499", "--stacks", "kernel", "-o", path, "--", *service]
    recording = subprocess.Popen([*COMMAND, "record", *command], stdout=-3, stderr=-3)
    while recording.poll() is None:
        try:
            ask(place, timeout_s=5)
        except OSError:  # the server is starting or has stopped
            time.sleep(0.05)
    assert recording.returncode == 0
    lines = innermost_lines(read_stacks(path))
    lines.pop(None, None)
    ((line,), count), *_ = lines.most_common()
    assert (line.function, line.line) == (f"step_{HOT}", hot_line)
    assert count > 20
    rows = run_checked("report", "--by", "line", "--sort", "kernel", path).stdout.splitlines()
    assert f"step_{HOT} (shop.py:{hot_line})" in rows[2]
