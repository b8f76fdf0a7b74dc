"""An agent stays within its memory limit despite programs with hostile debug sections."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.host import parse_mount_points
from otel_kprofiler.otlp import decode_windows
from tests.collector.units import UNIT, parse_unit
from tests.faults.accounts import check_stream, stop_and_check
from tests.unit.symbols.user import hostile_dwarf, hostile_files

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

MAX_RESIDENT_BYTES = 80 << 20
FILES_OF_EACH_KIND = int(os.environ.get("KPROFILER_HOSTILE_FILES", "1"))
SECONDS = float(os.environ.get("KPROFILER_HOSTILE_SECONDS", "20"))
SPINS = """
    volatile long count;
    __attribute__((noinline)) void spins(void) { for (int i = 0; i < 100000; i++) count++; }
    int main(void) { for (;;) spins(); }
"""
KINDS = {
    "line-rows": hostile_dwarf.line_rows,
    "functions": hostile_dwarf.functions,
    "names": hostile_dwarf.names,
    "indirect": hostile_dwarf.indirect,
    "packed-symbols": hostile_files.packed_symbols,
    "packed-streams": hostile_files.packed_streams,
    "packed-dictionary": hostile_files.packed_with_a_dictionary,
}
ADDED = (
    ".debug_info", ".debug_abbrev", ".debug_line", ".debug_str", ".debug_ranges", ".gnu_debugdata"
)  # fmt: skip
FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    "cgroup2": ("memory.max", "memory.peak", "memory.events"),
}


class Cgroup:
    """A cgroup (v1 or v2) with a memory limit."""

    def __init__(self, path, kind):
        self.path = path
        self._limit, self._peak, self._events = FILES[kind]

    def set_limit(self, limit_bytes):
        (self.path / self._limit).write_text(str(limit_bytes))

    @property
    def peak_bytes(self):
        """The peak memory, including the page cache, or 0 if the kernel does not report it."""
        path = self.path / self._peak
        return int(path.read_text()) if path.exists() else 0

    @property
    def kills(self):
        return int(re.search(r"oom_kill (\d+)", (self.path / self._events).read_text())[1])

    @property
    def prefix(self):
        """The command prefix that runs a command in this cgroup."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]


@pytest.fixture
def cgroup():
    mounts = Path("/proc/self/mountinfo").read_bytes()
    for kind, (limit, *_) in FILES.items():
        for mount in parse_mount_points(mounts, kind):
            path = Path(mount.path, f"kprofiler-test-{os.getpid()}")
            with contextlib.suppress(OSError):
                path.mkdir()
                if (path / limit).exists():
                    yield Cgroup(path, kind)
                    path.rmdir()
                    return
                path.rmdir()
    pytest.skip("cannot create a memory cgroup: needs root and a mounted hierarchy")


@pytest.fixture
def hostile_programs(tmp_path):
    if not all(map(shutil.which, ("gcc", "objcopy"))):
        pytest.skip("needs gcc and objcopy")
    (tmp_path / "spins.c").write_text(SPINS)
    good = tmp_path / "good"
    subprocess.run(["gcc", "-O1", "-g", "-o", good, tmp_path / "spins.c"], check=True)
    commands = [good]
    for kind, make in KINDS.items():
        image, program = tmp_path / f"{kind}.elf", tmp_path / kind
        image.write_bytes(make())
        listed = subprocess.run(
            ["readelf", "-SW", image], check=True, capture_output=True, text=True
        ).stdout
        words = []
        for section in ADDED:
            if f" {section} " in listed:
                content = tmp_path / f"{kind}{section}"
                subprocess.run(
                    ["objcopy", "--dump-section", f"{section}={content}", image], check=True
                )
                words.append(f"--add-section={section}={content}")
        assert words, listed
        subprocess.run(["objcopy", "--strip-all", *words, good, program], check=True)
        commands += copy_program(program, read_build_id(good))
    running = [subprocess.Popen(["nice", command]) for command in commands]
    yield tmp_path
    for process in running:
        process.kill()
        process.wait()


def read_build_id(program):
    note = subprocess.check_output(
        ["objcopy", "-O", "binary", "--only-section=.note.gnu.build-id", program, "/dev/stdout"]
    )
    return note[-20:]


def copy_program(program, build_id):
    image = program.read_bytes()
    assert build_id in image
    programs = [program]
    for number in range(1, FILES_OF_EACH_KIND):
        programs.append(program.with_name(f"{program.name}{number}"))
        programs[-1].write_bytes(image.replace(build_id, os.urandom(len(build_id))))
        programs[-1].chmod(0o755)
    return programs


def name_of_leaf(sample):
    frame = sample.stack.frames[0]
    return frame.module.name if frame.module else "", frame.function


@pytest.mark.long
@pytest.mark.parametrize("user_symbols", ["lines", "names"])
def test_hostile_files_cannot_exhaust_the_memory_limit_in_the_agents_systemd_unit(
    user_symbols, cgroup, hostile_programs, run_agent, receiver
):
    (limit,) = parse_unit(UNIT.read_text())["MemoryMax"]
    assert limit.endswith("M")
    cgroup.set_limit(int(limit[:-1]) << 20)
    receiver.up()
    agent = run_agent(
        receiver.endpoint,
        rate=99,
        user_symbols=user_symbols,
        limits=cgroup.prefix,
        environ={
            "XDG_CACHE_HOME": str(hostile_programs / "cache"),
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
        more="shutdown_timeout: 60s",
    )
    highest, end = 0, time.monotonic() + SECONDS
    named = set()
    while time.monotonic() < end or ("good", "spins") not in named:
        assert agent.process.poll() is None, agent.log[-3000:]
        assert time.monotonic() < end + 240, (named, agent.log[-3000:])
        highest = max(highest, read_resident_bytes(agent.process.pid))
        named = {
            name_of_leaf(sample)
            for payload in list(receiver.payloads)[-8:]
            for window in decode_windows(payload)
            for _, sample in window.profiles[0].samples
            if sample.stack.frames
        }
        time.sleep(0.5)
    account, exporter, got = stop_and_check(agent, receiver)
    assert exporter["pending"] == 0
    check_stream(got, *got.totals)
    figures = (
        f"{user_symbols}: {account['taken']} taken, {sum(account['lost'].values())} lost in the "
        f"ring, RSS {highest >> 20} MiB, cgroup {cgroup.peak_bytes >> 20} MiB, "
        f"{cgroup.kills} killed\n"
    )
    sys.stdout.write(figures)
    log = agent.log
    if user_symbols == "lines":
        assert "takes more memory than the" in log
        assert "raise it: the unit's MemoryHigh and MemoryMax" in log
    assert cgroup.kills == 0
    assert highest <= MAX_RESIDENT_BYTES, f"{highest >> 20} MiB"
