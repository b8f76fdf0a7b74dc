"""Files for other tools contain the windows' data, and the tools accept them."""

import gzip
import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from otel_kprofiler.formats import FORMATS, firefox, folded, function_rows, html, pprof, speedscope
from otel_kprofiler.model import (
    USER_SIDE,
    AddressRange,
    FileId,
    Frame,
    Module,
    ModuleKind,
    Resource,
    ResourceSamples,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.cache import cache_directory
from tests.page import data
from tests.wire import fields

pytestmark = pytest.mark.system


def test_speedscope_files_conform_to_the_schema(windows):
    """The file follows file-format-schema.json, and each sample is in the profile for its CPU."""
    document = json.loads(speedscope(windows, name="x"))
    frames = document["shared"]["frames"]
    assert all(isinstance(frame["name"], str) and frame["name"] for frame in frames)
    assert document["$schema"].endswith("file-format-schema.json")
    everything, cpu0, cpu1 = document["profiles"]
    for profile in (everything, cpu0, cpu1):
        assert profile["type"] == "sampled"
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert all(0 <= index < len(frames) for stack in profile["samples"] for index in stack)
    assert everything["endValue"] == 10
    assert (cpu0["name"], cpu0["unit"], cpu0["endValue"]) == ("CPU 0", "nanoseconds", 6000)
    names = [[frames[index]["name"] for index in stack] for stack in cpu1["samples"]]
    assert [stack[0] for stack in names] == ["a;b\n (8)", "dd (7)", "a;b\n (8)", "a;b\n (8)"]
    assert names[1][1:] == ["[0x401000]", "do_syscall_64", "vfs_read", "ext4_read", "inlined"]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_non_unicode_names_are_escaped_in_every_format(row, hostile):
    """A process name is an arbitrary byte string, such as ``\\xff``, which is not UTF-8."""
    written = row.write(hostile)
    if isinstance(written, bytes):
        packed = written.startswith(b"\x1f\x8b")
        written = (gzip.decompress(written) if packed else written).decode("latin-1")
    assert "f\\ud800" in written.replace("\\\\", "\\")
    assert row.name == "table" or "p\\xff" in written.replace("\\\\", "\\")
    assert written.encode()


def test_non_unicode_titles_are_escaped(hostile):
    assert html(hostile, title="\udcff").encode()
    assert speedscope(hostile, name="\udcff").encode()


def test_a_pprof_file_has_no_dangling_references(windows):
    results = {}
    for number, value in fields(gzip.decompress(pprof(windows))):
        results.setdefault(number, []).append(value)
    strings = [text.decode() for text in results[6]]
    assert strings[0] == ""
    locations = {dict(fields(body))[1] for body in results[4]}
    used = set()
    total = 0
    for body in results[2]:
        sample = dict(item for item in fields(body) if item[0] != 3)
        used |= set(sample.get(1, b""))
        total += sample[2][0]
    assert used == locations
    assert total == 10
    functions = {dict(fields(body))[1]: dict(fields(body)) for body in results[5]}
    lines = [
        dict(fields(value)) for body in results[4] for number, value in fields(body) if number == 4
    ]
    assert {line[1] for line in lines} == functions.keys()
    assert {strings[function[2]] for function in functions.values()} == {
        "vfs_read", "do_syscall_64", "ext4_read", "inlined", "bpf_prog_1_x",
    }  # fmt: skip
    assert (results[9], results[10], results[12]) == ([5000], [20_000], [1000])


def test_pprof_mappings_describe_the_segments_of_user_files(windows):
    ranges = (AddressRange(0x401000, 0x480000, ""),)
    file = Module(
        "held", ModuleKind.USER, None, FileId("5" * 32), 0, ranges=ranges, file_offset=0x1000
    )
    frame = Frame(file, 0x401234, (), 0, USER_SIDE, Unresolved.NO_SYMBOL_TABLE)
    sample = WindowSample(Stack.from_frames([frame]), 1, "t", 0, None, [1])
    profile = replace(windows[0].profiles[0], resources=[ResourceSamples(Resource({}), [sample])])
    results = list(fields(gzip.decompress(pprof([replace(windows[0], profiles=[profile])]))))
    (mapping,) = (dict(fields(body)) for number, body in results if number == 3)
    (location,) = (dict(fields(body)) for number, body in results if number == 4)
    assert [mapping[number] for number in (2, 3, 4)] == [0x401000, 0x480000, 0x1000]
    assert location[3] == 0x401234


PPROF = "github.com/google/pprof@v0.0.0-20260906184651-6331bc6350fe"


@pytest.fixture(scope="session")
def tool():
    """Returns the pprof program, which is built once in the tests' cache."""
    program = cache_directory() / PPROF.partition("@")[2] / "pprof"
    if not program.exists():
        if not shutil.which("go"):
            pytest.skip(f"needs the go command to build pprof, or {program}")
        environ = os.environ | {"GOBIN": str(program.parent), "GOFLAGS": "-mod=mod"}
        done = subprocess.run(["go", "install", PPROF], env=environ, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pprof cannot be built here: {done.stderr.strip()[-300:]}")
    return program


def test_the_pprof_tool_opens_the_file(windows, tmp_path, tool):
    path = tmp_path / "x.pprof"
    path.write_bytes(pprof(windows))

    def run(*arguments):
        command = [tool, "-symbolize=none", *arguments, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "Total samples = 10 " in run("-top", "-sample_index=samples")
    raw = run("-raw")
    assert "cpu:[0]" in raw
    assert "ext4_read" in raw
    focused = run("-top", "-sample_index=samples", "-tagfocus=pid=^8$")
    assert "vfs_read" in focused
    assert "ext4_read" not in focused


def test_every_format_sums_sample_values(off_cpu):
    assert folded(off_cpu) == "dd;do_syscall_64_[k] 10\ndd;do_syscall_64_[k];vfs_read_[k] 90\n"
    rows = {
        row.function: row
        for row in function_rows(profile for window in off_cpu for profile in window.profiles)
    }
    assert (rows["vfs_read"].self_count, rows["do_syscall_64"].total_count) == (90, 100)
    everything, cpu0 = json.loads(speedscope(off_cpu))["profiles"]
    assert (everything["unit"], everything["endValue"]) == ("nanoseconds", 100)
    assert (cpu0["weights"], cpu0["endValue"]) == ([70, 10, 20], 100)
    (track,) = json.loads(firefox(off_cpu))["threads"]
    assert track["samples"]["weightType"] == "tracing-ms"
    assert sum(track["samples"]["weight"]) == pytest.approx(100e-6)
    messages = list(fields(gzip.decompress(pprof(off_cpu))))
    strings = [value.decode() for number, value in messages if number == 6]
    types = [dict(fields(value)) for number, value in messages if number == 1]
    results = [(strings[one[1]], strings[one[2]]) for one in types]
    assert results == [("samples", "count"), ("off_cpu", "nanoseconds")]
    samples = [dict(fields(value))[2] for number, value in messages if number == 2]
    assert [list(values) for values in samples] == [[2, 90], [1, 10]]
    assert sorted(data(html(off_cpu))["samples"]["count"]) == [10, 90]
