"""Search tables are built in a child process with resource limits."""

import functools
import re
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from otel_kprofiler.elf import frame_index, make_pairs
from otel_kprofiler.host import limited_children
from otel_kprofiler.model import Segment
from otel_kprofiler.unwinding.indexing import Children, index_frames
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused

pytestmark = pytest.mark.system


def entry(body, *, back=0):
    body += b"\0" * (-len(body) % 4)
    return struct.pack("<II", len(body) + 4, back) + body


def cie(augmentation=b"zR", data=b"\x1b", rest=b"\x0c\x07\x08\x90\x01\0\0"):
    return entry(b"\1" + augmentation + b"\0\1\x78\x10" + bytes([len(data)]) + data + rest)


def fde(frames, start, *, form="<iI", address=0x1000, relative=True):
    """Builds a function's entry to append to ``frames``, which begins with the CIE."""
    at = len(frames)
    if relative:
        start -= address + at + 8
    return entry(struct.pack(form, start, 16) + b"\0", back=at + 4)


def test_entries_are_sorted_by_function():
    frames = cie()
    for start in (0x5000, 0x3000, 0x4000):
        frames += fde(frames, start)
    pairs = list(struct.iter_unpack("<ii", make_pairs(frames, 0x1000, 0x1000)))
    assert [pair[0] + 0x1000 for pair in pairs] == [0x3000, 0x4000, 0x5000]
    assert [frames[pair[1] + 4] for pair in pairs] == [pair[1] + 4 for pair in pairs]


@pytest.mark.parametrize(
    ("encoding", "form", "relative"),
    [
        (0x1B, "<iI", True),
        (0x1C, "<qQ", True),
        (0x03, "<II", False),
        (0x00, "<QQ", False),
        (0x04, "<QQ", False),
    ],
)
def test_pointer_encodings_used_by_compilers_are_decoded(encoding, form, relative):
    frames = cie(data=bytes([encoding]))
    frames += fde(frames, 0x3000, form=form, relative=relative)
    ((start, at),) = struct.iter_unpack("<ii", make_pairs(frames, 0x1000, 0x1000))
    assert (start + 0x1000, frames[at + 4 :][:4]) == (0x3000, struct.pack("<I", at + 4))


def test_personality_and_lsda_fields_before_the_fde_encoding_are_skipped():
    frames = cie(b"zPLR", b"\x9b\0\0\0\0\x1b\x1b")
    frames += fde(frames, 0x3000)
    assert len(make_pairs(frames, 0x1000, 0x1000)) == 8


def test_terminators_between_entries_from_two_object_files_are_skipped():
    frames = cie()
    frames += fde(frames, 0x3000) + bytes(4)
    frames += fde(frames, 0x4000) + bytes(4)
    assert len(make_pairs(frames, 0x1000, 0x1000)) == 16


@pytest.mark.parametrize(
    "frames",
    [
        b"\xff\xff\xff\xff" + bytes(20),  # a 64-bit length
        struct.pack("<II", 1000, 0),  # beyond the section
        struct.pack("<II", 2, 0),
        entry(bytes(8), back=400),  # CIE pointer to an address before the section
        entry(bytes(8), back=4),  # not a CIE, but the entry itself
        cie(b"zX") + entry(bytes(12), back=28),
        cie(b"zR", b"\x9b") + entry(bytes(12), back=28),  # an indirect pointer
        cie(b"zR", b"\x0f") + entry(bytes(12), back=28),
        cie(b"eh") + entry(bytes(12), back=28),
        cie() + entry(b"", back=28),  # too short for an address
        entry(b"\1zR") + entry(bytes(12), back=16),  # a truncated CIE
    ],
)
def test_malformed_eh_frame_sections_are_rejected(frames):
    with pytest.raises(ValueError):
        make_pairs(frames, 0x1000, 0x1000)


FAR = cie(data=b"\0") + fde(cie(data=b"\0"), 1 << 40, form="<QQ", relative=False)


def test_functions_too_far_away_for_a_32_bit_offset_are_rejected():
    with pytest.raises(ValueError, match="far"):
        make_pairs(FAR, 0x1000, 0x1000)


def in_process(tmp_path, frames, children=None, **limits):
    path = tmp_path / "frames"
    path.write_bytes(b"head" + frames)
    with open(path, "rb") as file:
        section = Segment(4, len(frames), 0x1000)
        return index_frames(file.fileno(), section, children=children or Children(), **limits)


def test_a_child_process_builds_the_same_table_as_its_parent(tmp_path):
    frames = cie()
    for number in range(2000):
        frames += fde(frames, 0x300000 - 16 * number)
    tables = in_process(tmp_path, frames)
    assert tables.made == make_pairs(frames, 0x1000, 0x1000)
    assert (tables.entries, tables.origin, tables.search_offset) == (2000, 0x1000, None)


@pytest.mark.usefixtures("ignored_children")
def test_a_table_is_built_even_if_the_kernel_discards_the_childs_status(tmp_path):
    frames = cie()
    frames += fde(frames, 0x3000)
    assert in_process(tmp_path, frames).entries == 1


def test_the_reason_for_a_rejection_is_returned(tmp_path):
    with pytest.raises(TableRefused, match="far from") as caught:
        in_process(tmp_path, FAR)
    assert caught.value.refusal is Refusal.NOT_INDEXED


def test_an_eh_frame_section_without_entries_is_rejected(tmp_path):
    with pytest.raises(TableRefused) as caught:
        in_process(tmp_path, bytes(4))
    assert caught.value.refusal is Refusal.NO_FRAMES


def test_a_child_that_takes_too_long_is_killed(tmp_path):
    with pytest.raises(TableRefused, match="took over") as caught:
        in_process(tmp_path, cie() + bytes(1 << 20), timeout_s=0.0)
    assert caught.value.refusal is Refusal.FAILED


def test_an_eh_frame_section_that_exceeds_its_cpu_time_limit_is_rejected(tmp_path, monkeypatch):
    script = tmp_path / "endless.py"
    script.write_text("while True: pass")
    monkeypatch.setattr(frame_index, "__file__", str(script))
    with pytest.raises(TableRefused, match="took more than 2 s of CPU for 1 MiB") as caught:
        in_process(tmp_path, cie())
    assert caught.value.refusal is Refusal.SLOW


def test_rejected_eh_frame_sections_are_not_indexed_again_until_they_change(tmp_path, monkeypatch):
    children, path = Children(), tmp_path / "frames"
    path.write_bytes(FAR.ljust(1 << 20, b"\0"))
    with open(path, "rb+") as file:
        index = functools.partial(
            index_frames, file.fileno(), Segment(0, 1 << 20, 0x1000), children=children
        )
        with pytest.raises(TableRefused) as first:
            index()
        assert first.value.refusal is Refusal.NOT_INDEXED
        with monkeypatch.context() as without:
            without.setattr(limited_children, "MeteredChild", None)
            with pytest.raises(TableRefused, match=f"^{re.escape(str(first.value))}$") as again:
                index()
        assert again.value.refusal is first.value.refusal
        frames = cie()
        file.write(frames + fde(frames, 0x3000))
        file.flush()
        assert index().entries == 1


def test_an_eh_frame_section_is_indexed_again_after_a_timeout(tmp_path):
    children, frames = Children(), cie()
    frames += fde(frames, 0x3000)
    with pytest.raises(TableRefused, match="took over"):
        in_process(tmp_path, frames, children, timeout_s=0.0)
    with open(tmp_path / "frames", "rb") as file:
        section = Segment(4, len(frames), 0x1000)
        assert index_frames(file.fileno(), section, children=children).entries == 1


def test_stopping_kills_a_busy_child(tmp_path, monkeypatch):
    children, caught = Children(), []
    script = tmp_path / "endless.py"
    script.write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(frame_index, "__file__", str(script))

    def make():
        with pytest.raises(TableRefused) as refused:
            in_process(tmp_path, cie(), children)
        caught.append(refused.value)

    thread = threading.Thread(target=make)
    thread.start()
    while not children._running and thread.is_alive():
        time.sleep(0.001)
    children.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert caught[0].refusal is Refusal.FAILED
    with pytest.raises(TableRefused, match="is stopping"):
        in_process(tmp_path, cie(), children)


def test_the_childs_memory_is_limited(tmp_path):
    path = tmp_path / "frames"
    with open(path, "wb") as file:
        file.truncate(1 << 31)
    with open(path, "rb") as file:
        done = subprocess.run(
            [sys.executable, "-I", "-S", frame_index.__file__, "0", str((1 << 31) - 4096), "4096"],
            stdin=file, capture_output=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == b"MemoryError\n"


@pytest.mark.long
def test_indexing_an_entry_uses_little_memory():
    count = 150_000
    head = struct.pack("<II4sBBBBB3x", 16, 0, b"\1zR\0", 1, 0x78, 16, 1, 0x1B)
    ats = range(len(head), len(head) + 16 * count, 16)
    frames = head + b"".join(struct.pack("<IIiI", 12, at + 4, -2 * at, 1) for at in ats)
    tracemalloc.start()
    try:
        pairs = make_pairs(frames, 1 << 30, 1 << 30)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 * count
    assert list(struct.iter_unpack("<ii", pairs)) == sorted((8 - at, at) for at in ats)
