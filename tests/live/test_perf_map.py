"""JIT-compiled functions have the names that installed programs write to perf maps and jitdumps."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import TICK_NS, Access, ProcessMaps, read_start_ticks
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.symbols import ProcessesResolver
from otel_kprofiler.symbols.user.jitdump import JitDumpParser, Loaded
from otel_kprofiler.symbols.user.perf_map import PerfMap, parse_perf_map
from tests.further import further

pytestmark = pytest.mark.live

NODE = """
    function hot(n) { let s = 0; for (let i = 0; i < n; i++) s += Math.sqrt(i) % 3; return s }
    let x = 0;
    for (let i = 0; i < 2000; i++) x += hot(20000);
    console.log(x);
    process.stdin.resume();
"""
PYTHON = """
def hot(n):
    return sum(i % 3 for i in range(n))
print(hot(1000), flush=True)
input()
"""
COMMANDS = [
    (["node", "--perf-basic-prof", "-e", NODE], "JS:*hot "),
    (["python3.13", "-X", "perf", "-c", PYTHON], "py::hot:"),
    (["python3.12", "-X", "perf", "-c", PYTHON], "py::hot:"),
]


def runs(command):
    path = shutil.which(command[0])
    return path and not subprocess.run([path, "--version"], capture_output=True).returncode


@pytest.mark.parametrize(("command", "wanted"), COMMANDS, ids=lambda case: case[0])
def test_jit_compiled_functions_have_names(command, wanted, request, tmp_path):
    if not runs(command):
        pytest.skip(f"{command[0]} is not installed")
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,  # V8 also writes another file to this directory
    ) as process:
        assert process.stdout.readline(), "the compiler does not know the option"
        key = ProcessKey(process.pid, read_start_ticks(Access(), process.pid) * TICK_NS)
        perf_map = PerfMap(key, Access(), Clock())
        request.addfinalizer(perf_map.close)
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        while perf_map.update(now):
            pass
        path = Path(f"/tmp/perf-{process.pid}.map")
        content = path.read_bytes()
        path.unlink()
        codes = parse_perf_map(content)
        maps = ProcessMaps(process.pid)
        (*_, hot) = [code for code in codes if code.name.startswith(wanted.encode())]
        code_in_memory = maps.find(hot.start)
        maps.close()
        process.stdin.close()
    assert len(codes) > 0.9 * content.count(b"\n")
    assert code_in_memory.mapping.is_executable
    assert not code_in_memory.mapping.path.startswith("/")
    for address in (hot.start, hot.end - 1):
        assert perf_map.lookup(address, now)[:3] == (hot.start, hot.end, hot.name.decode())
    assert not perf_map.update(now + 1)  # the map remains readable after the process has exited
    assert perf_map.lookup(hot.start, now + 1)
    assert len(codes) > 10


LINES = """function hot(n) {
    let s = 0;
    for (let i = 0; i < n; i++) s += Math.sqrt(i) % 3;
    return s;
}
let x = 0;
for (let i = 0; i < 2000; i++) x += hot(20000);
for (let i = 0; i < 300; i++) x += new Function(`return ${i}`)();  // fills V8's buffer
console.log(x);
process.stdin.resume();
"""


@pytest.mark.parametrize(
    "option", ["--perf-prof-delete-file", *further("--no-perf-prof-delete-file")]
)
def test_functions_and_lines_in_a_jitdump_are_resolved(option, tmp_path):
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    script = tmp_path / "hot.js"
    script.write_text(LINES)
    command = ["node", "--always-sparkplug", "--perf-prof", option, script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline()
        with open(f"/proc/{process.pid}/maps") as maps:
            (name,) = {line.split()[0] for line in maps if f"jit-{process.pid}.dump" in line}
        text = Path(f"/proc/{process.pid}/map_files/{name}").read_bytes()
        parsed = JitDumpParser(process.pid).parse(text, len(text))
        loads = [event.code for event in parsed.events if isinstance(event, Loaded)]
        (*_, hot) = [code for code in loads if code.name.startswith(b"JS:*hot ")]
        resolver = ProcessesResolver()
        answers = resolver.resolve(range(hot.start, hot.end), process.pid)
        (behind,) = resolver.resolve([hot.end], process.pid)
        resolver.close()
        process.stdin.close()
    assert len(loads) > 300
    assert {answer.function for answer in answers} == {hot.name.decode()}
    places = {(line.file, line.line) for answer in answers for line in answer.lines if line.line}
    assert places <= {(str(script), line) for line in range(1, 6)}
    assert {line for _, line in places} >= {3, 4}
    assert behind.function != hot.name.decode()
