"""The content of profile files determines their format, and corruption is reported."""

import gzip
import json

import pytest
from click.testing import CliRunner

from otel_kprofiler.analysis import GROUPINGS, load_samples
from otel_kprofiler.cli import check
from otel_kprofiler.cli.profiles import read_profile_file
from otel_kprofiler.errors import KProfilerError, PayloadError
from otel_kprofiler.formats import FORMATS, folded, parse_pprof
from otel_kprofiler.model import KERNEL_SIDE as KERNEL
from otel_kprofiler.model import (
    OFF_CPU,
    PYTHON_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    ProfileKind,
    SideKind,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.model import USER_SIDE as NATIVE
from tests.windows import VMLINUX, make_profile, make_stack, make_window

START = 1_600_000_000 * 10**9
JVM = SideKind("jvm", "jvm", "user", has_files=True)
JVM_SO = Module("libjvm.so", ModuleKind.USER, None, FileId("ab" * 16), 0)
WRITE = {row.name: row.write for row in FORMATS}
STRINGS = b"", b"objects", b"count", b"bytes"


def frame(side, name, line=0, module=None):
    return Frame(module, 0x10, (Line(name, file="Main.java" if line else "", line=line),), 0, side)


def window(number=0):
    """Returns four samples from a Java program: two in the kernel and two in native code."""
    java = frame(JVM, "Main.run", 7)
    start = frame(NATIVE, "start_thread", module=JVM_SO)
    write = [frame(KERNEL, name, module=VMLINUX) for name in ("vfs_write", "__x64_sys_write")]
    times = [START + number * 10**9, START + number * 10**9 + 1]
    samples = [
        WindowSample(Stack.from_frames([*write, java, start]), 7, "main", 0, None, times),
        WindowSample(Stack.from_frames([frame(NATIVE, "gc"), start]), 8, "GC", 1, None, times),
    ]
    group = {"process.pid": 7, "process.executable.name": "java"}, samples
    return make_window(times[0], times[0] + 10**9, group, period_ns=10**7, taken=4)


def read(tmp_path, content, expected=()):
    """Writes a file and reads its windows. Asserts that the expected problems are reported."""
    path = tmp_path / "no suffix"
    path.write_bytes(content)
    said = []
    profile_file = read_profile_file(str(path), said.append)
    assert [text.removeprefix(f"{path}: ").partition(":")[0] for text in said] == list(expected)
    return profile_file


@pytest.mark.parametrize(
    ("form", "pack"),
    [
        ("otlp", bytes), ("otlp", gzip.compress), ("otlp-json", bytes),
        ("otlp-json", gzip.compress), ("pprof", bytes), ("pprof", gzip.decompress),
    ],
)  # fmt: skip
def test_every_format_is_detected_by_its_content(tmp_path, form, pack):
    windows = [window(0), window(1)]
    result = read(tmp_path, pack(WRITE[form](windows)))
    expected = folded(windows)
    if form == "pprof":  # pprof has no frame types
        expected = expected.replace(" (Main.java:7)", "")
    assert folded(result) == expected
    assert load_samples(result).count == 8


def test_json_may_be_one_multi_line_document(tmp_path):
    line = WRITE["otlp-json"]([window()])
    assert folded(read(tmp_path, json.dumps(json.loads(line), indent=2).encode())) == folded(
        [window()]
    )


@pytest.mark.parametrize("form", ["otlp", "otlp-json", "pprof"])
def test_kernel_time_is_attributed_to_the_calling_python_line(tmp_path, form):
    view = Line("view", file="/srv/app.py", line=42, start_line=40)
    frames = [frame(KERNEL, "vfs_write", module=VMLINUX), frame(NATIVE, "write", module=JVM_SO)]
    stack = Stack.from_frames([*frames, Frame(None, 0, (view,), 0, PYTHON_SIDE)])
    samples = [WindowSample(stack, 7, "main", 0, None, [START])]
    content = WRITE[form]([make_window(START, START + 1, ({}, samples), period_ns=10**7, taken=1)])
    (line,) = GROUPINGS["line"](load_samples(read(tmp_path, content)))
    assert (line.key, line.kernel) == (("view (app.py:42)", "/srv/app.py"), 10**7)


def test_java_and_native_frames_keep_their_frame_type(tmp_path):
    samples = load_samples(read(tmp_path, WRITE["otlp"]([window()])))
    (line, *_) = GROUPINGS["line"](samples)
    assert line.key == ("Main.run (Main.java:7)", "Main.java")
    assert (line.own, line.kernel) == (2 * 10**7, 2 * 10**7)
    again = load_samples(read(tmp_path, WRITE["otlp"](samples.windows())))
    sides = {side.kind.frame_type for stack in again.tables.stacks for side in stack.sides}
    assert sides == {"kernel", "jvm", "native"}


DAMAGES = {
    "cut message": (lambda data: data[:-9], "skipped corrupt data"),
    "cut length": (lambda data: data + b"\0\0", "skipped corrupt data"),
    "overwritten": (
        lambda data: data.replace(b"java", b"\xff\xff\xff\xff", 1), "skipped corrupt data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_intact_messages_are_read_and_malformed_messages_are_reported(tmp_path, damage):
    change, expected = DAMAGES[damage]
    data = change(WRITE["otlp"]([window(0), window(1), window(2)]))
    counted = load_samples(read(tmp_path, data, [expected])).count
    assert counted == (12 if damage == "cut length" else 8)


def test_a_truncated_json_line_is_skipped(tmp_path):
    lines = WRITE["otlp-json"]([window(0), window(1)])
    assert load_samples(read(tmp_path, lines[:-30], ["skipped corrupt data"])).count == 4


def test_complete_messages_in_a_truncated_gzip_file_are_read(tmp_path):
    parts = [gzip.compress(WRITE["otlp-json"]([window(number)])) for number in (0, 1)]
    expected = ["the compressed data is truncated", "skipped corrupt data"]
    assert load_samples(read(tmp_path, (parts[0] + parts[1])[:-40], expected)).count == 4


@pytest.mark.parametrize(
    ("pack", "status", "expected"),
    [
        (gzip.compress, 0, "ok"),
        (lambda data: gzip.compress(b"") + gzip.compress(data), 0, "ok"),
        (lambda data: gzip.compress(data)[:-4], 1, "the compressed data is truncated"),
        (lambda data: gzip.compress(b"no profiles"), 1, "not a protobuf message"),
    ],
)
def test_the_check_command_reads_compressed_files(pack, status, expected, tmp_path):
    path = tmp_path / "packed"
    path.write_bytes(pack(WRITE["otlp"]([window()])))
    done = CliRunner().invoke(check.command, [str(path)])
    assert (done.exit_code, expected in done.output) == (status, True), done.output


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"<!doctype html>", "this is not a supported profile, but HTML"),
        (b"PERFILE2....", "the header of the perf.data file is truncated"),
        (b"\x28\xb5\x2f\xfd", "this is not a supported profile, but a file compressed with zstd"),
        (b'{"resourceSpans": []}', "the file contains no profiles"),
        (b"{}\n", "the file contains no profiles"),
        (b"one;two;three 5\n", "not a protobuf message"),
        (gzip.compress(b"hello"), "not a protobuf message"),
        (b"\x1f\x8b\x08", "the file is empty"),
    ],
)
def test_files_that_are_not_profiles_are_rejected_with_a_hint(tmp_path, content, expected):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(PayloadError) as refused:
        read_profile_file(str(path), lambda problem: None)
    assert refused.value.message.startswith(f"{path}: {expected}")
    assert refused.value.hint


def test_a_corrupt_recording_is_rejected(tmp_path):
    path = tmp_path / "host.raw"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(KProfilerError, match="not a recording"):
        read_profile_file(str(path), print)


@pytest.mark.parametrize("size", range(0, 200, 7))
def test_a_truncated_pprof_file_raises_only_the_documented_error(size):
    data = gzip.decompress(WRITE["pprof"]([window()]))
    try:
        parse_pprof(data[:size])
    except PayloadError as error:
        assert error.message  # noqa: PT017 - any cut is allowed to be whole


def test_pprof_files_with_several_kinds_keep_the_number_of_samples(tmp_path):
    """pprof adds up the values of samples that are equal except for their times."""
    on_cpu = WindowSample(make_stack("f"), 7, "main", 0, None, [START, START + 1], [])
    off_cpu = WindowSample(make_stack("g"), 7, "main", 0, None, [START] * 3, [5, 6, 9])
    profiles = [
        make_profile(({}, [on_cpu]), period_ns=10**7),
        make_profile(({}, [off_cpu]), kind=OFF_CPU, period_ns=0),
    ]
    samples = load_samples(read(tmp_path, WRITE["pprof"]([Window(START, START + 9, profiles)])))
    assert [
        (kind.name, samples.of_kind(kind).count, sum(samples.of_kind(kind).weights()))
        for kind in samples.kinds
    ] == [("on_cpu", 2, 2 * 10**7), ("off_cpu", 3, 20)]


def test_labels_in_pprof_files_become_sample_labels():
    labels = ("tenant", "acme"), ("zone", "b")
    sample = WindowSample(make_stack("f"), 7, "main", 3, None, [START], [], labels)
    made = make_window(START, START + 1, ({"process.pid": 7}, [sample]))
    (result,) = parse_pprof(gzip.decompress(WRITE["pprof"]([made])))
    assert [(row.tid, row.cpu, row.labels) for _, row in result.samples] == [(7, 3, labels)]


def test_numeric_labels_in_pprof_files_become_text():
    """Go's heap profiles have a label ``bytes``."""
    sample_type, sample = b"\x08\x01\x10\x02", b"\x12\x01\x05" + b"\x1a\x04\x08\x03\x18\x40"
    messages = (1, sample_type), (2, sample), *((6, text) for text in STRINGS)
    data = b"".join(bytes([number << 3 | 2, len(body)]) + body for number, body in messages)
    (result,) = parse_pprof(data)
    assert [row.labels for _, row in result.samples] == [(("bytes", "64"),)]


def test_a_pprof_file_with_off_cpu_time_becomes_an_off_cpu_profile():
    off_cpu = ProfileKind("off_cpu", "off_cpu", "nanoseconds")
    waits = [WindowSample(make_stack("schedule"), 7, "main", 0, None, [START], [5000])]
    window = make_window(START, START + 1, ({}, waits), kind=off_cpu, period_ns=0)
    (result,) = parse_pprof(gzip.decompress(WRITE["pprof"]([window])))
    assert [(profile.kind, profile.weight) for profile in result.profiles] == [(off_cpu, 5000)]
