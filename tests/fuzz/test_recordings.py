"""Untrusted recordings are read at low cost, or rejected with a reason."""

import contextlib
import copy
import io
import json
import struct
import zipfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.bpf import RECORD_VERSION
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import FrameSource, StackEnd, pack_user_stack
from otel_kprofiler.otlp import encode_window
from otel_kprofiler.pipeline import WindowSchedule
from otel_kprofiler.pipeline.composition import replay
from otel_kprofiler.recording import Recording
from otel_kprofiler.recording.recording import FORMAT_VERSION
from tests.fuzz.bounds import REFUSED, read_within
from tests.records import in_ring, pack_record

pytestmark = pytest.mark.fuzz

HEADER = {
    "version": FORMAT_VERSION, "record_version": RECORD_VERSION,
    "offset_ns": 1_790_000_000_000_000_000,
    "period_ns": 10_000_000, "stack_limit": 1016, "until_ns": 900,
    "counts": {
        "on_cpu": {
            "taken": 2, "lost": {"ring_full": 0}, "received": 2, "filtered": {"idle": 1},
            "truncated": {"pending": 1},
        },
    },
}  # fmt: skip
TEXTS = {
    "recording.json": HEADER,
    "errors.json": {"/sys/kernel/notes": 13},
    "resources.json": [[3, 1, 0, None, {"process.pid": 3, "tags": ["a", "b"]}]],
    "user_files.json": [[5, 6, 7, "/bin/a", "ab" * 20, "cd" * 16, [[0, 4096, 4096]], False]],
}
SYMBOL = [0xFFFF_FFFF_C100_0000, 64, "bpf_prog_1", "bpf", 1, 7]
BASE = 0xFFFF_FFFF_C000_0000
MODULE = ["m", "ab" * 20, "cd" * 16, BASE, [[BASE, BASE + 4096, ".text"]], "sections", 1]
READING = {
    "looked_ns": 50, "free_ns": 0, "removed": {"9": [10, 20]}, "modules": [1],
    "new": {"1": [[MODULE, "ffffffffc0000010 t f\t[m]\n", False], None, 0]},
}  # fmt: skip
EVENTS = {
    "events/modules": [READING],
    "events/code": [[50, "added", [SYMBOL], 0]],
    "events/code_details": [SYMBOL, [7, "kprobe", "abcd", 1, "f"], [[0, "a.c", 3]]],
}


def block(time_ns, content):
    return struct.pack("<QI", time_ns, len(content)) + content


def ring_record(time_ns):
    user = pack_user_stack(StackEnd.PENDING, [(0x1000, None, FrameSource.REGISTERS)])
    frames = (0xFFFF_FFFF_8100_0030, 0xFFFF_FFFF_C000_0030)
    return in_ring(pack_record(time_ns, frames, user=len(user)) + user)


BINARY = {
    "samples/000000": block(150, ring_record(100) + ring_record(90)),
    "files/proc/kallsyms": (
        b"ffffffff81000000 T _text\nffffffff81000010 T start\nffffffff81001000 T _etext\n"
    ),
    "files/proc/modules": b"m 4096 1 - Live 0xffffffffc0000000\n",
    "files/sys/module/m/sections/.text": b"0xffffffffc0000000\n",
}


def archive(texts=TEXTS, binary=BINARY, events=EVENTS, method=zipfile.ZIP_DEFLATED):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as file:
        for name, value in texts.items():
            file.writestr(name, value if isinstance(value, bytes) else json.dumps(value))
        for name, value in binary.items():
            file.writestr(name, value)
        for name, value in events.items():
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            file.writestr(f"{name}/000000", block(950, content))
    return memory.getvalue()


def play(path):
    windows = []
    with contextlib.closing(Recording(str(path))) as recording:
        replay(recording, WindowSchedule(10**9), windows.append)
    for window in windows:
        encode_window(window)
    return windows


def play_bytes(content, path):
    path.write_bytes(content)
    with contextlib.suppress(KProfilerError):
        return play(path)
    return None


def test_the_seed_recording_contains_every_record_type(tmp_path):
    (window,) = play_bytes(archive(), tmp_path / "a")
    (sample,) = window.profiles[0].resources[0].samples
    assert [frame.function for frame in sample.stack.frames] == ["start", "f", ""]
    assert window.sample_count == 2


def paths_in(value, path=()):
    yield path
    items = []
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield from paths_in(item, (*path, key))


ALL = {**TEXTS, **EVENTS}
PLACES = [path for name in ALL for path in paths_in(ALL[name], (name,))]
STRANGE = [
    None, True, -1, 0, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**400, 1.5, float("inf"),
    float("nan"), "", "x", "\ud800", "9" * 5000, [], [[]], {}, {"": None}, [1, 2, 3],
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(STRANGE)), max_size=3))
@settings(max_examples=500, deadline=10_000)
def test_recordings_in_which_values_were_replaced_are_read_or_rejected(tmp_path_factory, changes):
    changed = copy.deepcopy(ALL)
    for path, value in changes:
        target = changed
        try:
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = copy.deepcopy(value)
        except (IndexError, KeyError, TypeError):
            continue  # an earlier change has removed this part
    texts = {name: changed[name] for name in TEXTS}
    events = {name: changed[name] for name in EVENTS}
    path = tmp_path_factory.getbasetemp() / "values"
    play_bytes(archive(texts, events=events), path)


@given(
    st.sampled_from([*BINARY, None]),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40), st.binary(max_size=40))),
)
@settings(max_examples=400, deadline=10_000)
@example("samples/000000", [(0, 0, struct.pack("<QI", 1, 0xFFFF_FFFF))])
@example("samples/000000", [(8 + 4 + 8 + 60, 2, b"\xff\x7f")])
def test_recordings_with_changed_bytes_are_read_or_rejected(tmp_path_factory, name, changes):
    content = bytearray(BINARY[name] if name else archive())
    for at, cut, new in changes:
        content[at : at + cut] = new
    made = archive(binary={**BINARY, name: bytes(content)}) if name else bytes(content)
    play_bytes(made, tmp_path_factory.getbasetemp() / "bytes")


def overlapping():
    """Returns an archive with many directory entries for the same data."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in TEXTS.items():
            file.writestr(name, json.dumps(value))
        file.writestr("samples/000000", bytes(100_000_000))
        first = file.infolist()[-1]
        for number in range(1, 2000):
            other = copy.copy(first)
            other.filename = other.orig_filename = f"samples/{number:06}"
            file.filelist.append(other)
            file.NameToInfo[other.filename] = other
    return memory.getvalue()


DEEP = "/".join(["files", *["a"] * 30_000])
BOMBS = {
    "block": lambda: archive(binary={"samples/000000": bytes(600_000_000)}),
    "header": lambda: archive({**TEXTS, "recording.json": b"[" * 100_000}),
    "value": lambda: archive({**TEXTS, "resources.json": b"[" + b"[]," * 20_000_000 + b"[]]"}),
    "number": lambda: archive({**TEXTS, "errors.json": b'{"a":' + b"9" * 100_000 + b"}"}),
    "event": lambda: archive(events={"events/code": b"[" * 1_000_000}),
    "events": lambda: archive(events={"events/code": b"[" + b"[]," * 20_000_000 + b"[]]"}),
    "file": lambda: archive(binary={"files/proc/kallsyms": bytes(600_000_000)}),
    "path": lambda: archive(binary={DEEP: b""}),
    "method": lambda: archive(method=zipfile.ZIP_LZMA),
    "overlap": overlapping,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_reading_a_small_recording_requires_little_memory_and_time(bomb, tmp_path):
    path = tmp_path / "a.kprofile"
    path.write_bytes(BOMBS[bomb]())
    assert path.stat().st_size < 1_000_000
    assert read_within(lambda: play(path)) == REFUSED
