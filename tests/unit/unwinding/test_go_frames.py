"""Unwind tables are built from Go's function tables."""

import bisect
import functools
import io
import itertools
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from elftools.dwarf.callframe import FDE, CallFrameInfo
from elftools.dwarf.structs import DWARFStructs
from elftools.elf.elffile import ELFFile
from hypothesis import example, given
from hypothesis import strategies as st

from otel_kprofiler.bpf import PAGE_BYTES
from otel_kprofiler.elf import ElfFile, FileSource, find_section, read_elf, read_sections
from otel_kprofiler.host import OpenedFile, limited_children
from otel_kprofiler.unwinding import go_frames, go_x86, loading
from otel_kprofiler.unwinding.frame_writing import Segment, pack_tables
from otel_kprofiler.unwinding.go_frames import Shapes, find_text, make_tables
from otel_kprofiler.unwinding.go_table import Code, Table, parse_sizes
from otel_kprofiler.unwinding.indexing import Children, index_go
from otel_kprofiler.unwinding.refusal import TableRefused
from tests.further import further
from tests.unit.unwinding.go_files import ORDINARY, PUSH, TEXT, Made, go_file, pack_sizes

ADDRESS = 0x700000
X86_64 = 62
PROGRAMS = Path(__file__).parents[2] / "truth" / "programs"
WORK, CGO = PROGRAMS / "work.go", PROGRAMS / "cgo.go"
RSP, RBP, RIP = 7, 6, 16


def decode(frames, address=ADDRESS):
    structs = DWARFStructs(little_endian=True, dwarf_format=32, address_size=8)
    info = CallFrameInfo(io.BytesIO(bytes(frames)), len(frames), address, structs, True)
    return {e["initial_location"]: e for e in info.get_entries() if isinstance(e, FDE)}


def read_rows(entries, start, *registers):
    """Returns the rows for the function at ``start``: offset, CFA, and register rules."""
    results = []
    for row in entries[start].get_decoded().table:
        cfa = row["cfa"]
        where = tuple(cfa.expr) if cfa.expr is not None else (cfa.reg, cfa.offset)
        rules = [(row[r].type, row[r].arg) if r in row else None for r in registers]
        results.append((row["pc"] - start, where, *rules))
    return results


def rows(*functions, **options):
    """Returns the last function's unwind rows: offset, CFA, rbp rule and return address rule."""
    file, table, segments = go_file([*[ORDINARY] * 10, *functions], **options)
    maker = make_tables(file, table, TEXT, segments, ADDRESS, machine=X86_64)
    entries = decode(maker.frames)
    assert [(start, at >= ADDRESS) for start, at in maker.pairs] == [(s, True) for s in entries]
    return read_rows(entries, max(entries), RBP, RIP)


SAVED, RETURN = ("OFFSET", -16), ("OFFSET", -8)
UNKNOWN, OUTERMOST = ("VAL_EXPRESSION", []), ("UNDEFINED", None)


def test_unwind_rows_match_the_frame_size():
    assert rows() == [
        (0, (RSP, 8), None, RETURN),
        (1, (RSP, 16), SAVED, RETURN),
        (5, (RSP, 48), SAVED, RETURN),
        (60, (RSP, 16), SAVED, RETURN),
        (61, (RSP, 8), None, RETURN),
    ]


def test_distances_and_sizes_are_decoded_from_varints_of_every_length():
    sizes = ((1, 0), (300, 8), (70_000, 1 << 20), (70_001, 0))
    assert [(at, cfa[1]) for at, cfa, *_ in rows(Made(b"main.large", PUSH + bytes(30), sizes))] == [
        (0, 8), (1, 16), (300, (1 << 20) + 8), (70_000, 8)
    ]  # fmt: skip


def test_a_function_that_does_not_start_with_a_push_has_not_saved_rbp():
    (_, _, first, _), (_, _, second, _) = rows(Made(b"main.asm", bytes(32), ((4, 0), (32, 24))))
    assert first == second == ("UNDEFINED", None)


def test_frame_sizes_alone_do_not_determine_whether_a_function_saves_rbp():
    without_push = Made(b"main.asm", bytes(64), ORDINARY.sizes)
    assert [row[2] for row in rows(without_push)] == [("UNDEFINED", None)] * 5
    assert rows(without_push, ORDINARY) == rows()
    assert rows(without_push, ORDINARY._replace(flags=2)) == rows(ORDINARY._replace(flags=2))


def test_a_function_without_a_frame_preserves_rbp():
    assert rows(Made(b"main.leaf", bytes(32), ((32, 0),))) == [(0, (RSP, 8), None, RETURN)]


def test_outermost_functions_end_the_stack():
    ((_, _, _, ra),) = rows(Made(b"runtime.mstart", bytes(32), ((32, 0),), flags=5))
    assert ra == OUTERMOST


LOAD, LOAD_BACK = b"\x48\x8b\x62\x38", b"\x48\x8b\x60\x38"  # mov 56(%rdx), %rsp; mov 56(%rax), %rsp


def switching(name):
    code = PUSH + bytes(10) + LOAD + bytes(6) + LOAD_BACK + bytes(10)
    return rows(Made(name, code, ((1, 0), (37, 8), (38, 0)), flags=6))


def test_systemstack_is_unwound_through_the_previous_stacks_frame_pointer():
    *before, on_other, back = switching(b"runtime.systemstack")
    assert before == [(0, (RSP, 8), None, RETURN), (1, (RSP, 16), SAVED, RETURN)]
    assert (on_other[0], on_other[1], on_other[3]) == (18, (0x76, 16), RETURN)  # breg6 16
    assert (back[0], back[3]) == (28, UNKNOWN)


def test_functions_called_by_mcall_do_not_return_to_it():
    assert [(row[0], row[3]) for row in switching(b"runtime.mcall")] == [
        (0, RETURN), (1, RETURN), (18, OUTERMOST)
    ]  # fmt: skip


def test_the_caller_is_unknown_after_an_unrecognized_stack_switch():
    assert switching(b"runtime.other")[-1][0] == 18
    assert switching(b"runtime.other")[-1][3] == UNKNOWN
    ((_, _, _, ra),) = rows(Made(b"gogo", bytes(32), ((32, 0),), flags=6))
    assert ra == UNKNOWN


TO_G0, BACK = b"\x48\x8b\x66\x38", b"\x48\x89\xf4"  # mov 56(%rsi), %rsp; mov %rsi, %rsp
KEPT = {
    0: bytes.fromhex("48897c2408 488b7f08 4829d7 48893c24"),
    0x28: bytes.fromhex("48897c2430 488b7f08 4829d7 48897c2428"),
}
LEAVE = b"\x48\x83\xec\x10"  # sub $16, %rsp


def calling_c(kept):
    code = PUSH + b"\x48\x89\xe2" + TO_G0 + kept + bytes(5) + BACK + bytes(2)
    sizes = [(1, 0), (len(code) - 1, 8), (len(code), 0)]
    code += LEAVE + bytes(5) + BACK + bytes(2)
    sizes += [(len(code) - 1, 8), (len(code), 0)]
    return rows(Made(b"runtime.asmcgocall", code, tuple(sizes), flags=6)), code


@pytest.mark.parametrize("depth", KEPT)
def test_c_code_is_unwound_to_the_goroutine_that_called_it(depth):
    made, code = calling_c(KEPT[depth])
    switched, kept = code.index(TO_G0) + 4, code.index(KEPT[depth]) + len(KEPT[depth])
    back, left = code.index(BACK) + 3, code.index(LEAVE) + 4
    goroutine = (0x77, depth + 8, 6, 0x23, 8, 6, 0x77, depth, 6, 0x1C, 0x23, 16)
    assert [(at, cfa) for at, cfa, *_ in made] == [
        (0, (RSP, 8)), (1, (RSP, 16)), (switched, (0x76, 16)), (kept, goroutine),
        (back, (RSP, 16)), (left - 5, (RSP, 8)), (left - 4, (RSP, 16)), (left, (RBP, 16)),
        (left + 8, (RSP, 16)), (len(code) - 1, (RSP, 8)),
    ]  # fmt: skip
    assert [fp for *_, fp, _ in made] == [None, *[SAVED] * 4, None, *[SAVED] * 3, None]


def test_the_caller_of_c_code_is_unknown_if_asmcgocall_is_not_recognized():
    for kept in (KEPT[0][:-1] + b"\x25", KEPT[0x28].replace(b"\x30", b"\x38"), b""):
        assert [ra for *_, ra in calling_c(kept)[0]] == [UNKNOWN]


def test_unwinding_a_callback_from_c_continues_at_the_goroutines_call_to_c():
    code = PUSH + bytes(10) + LOAD + bytes(10)
    called = Made(b"runtime.cgocallback", code, ((1, 0), (31, 32), (32, 0)), flags=6)
    assert [(at, cfa) for at, cfa, *_ in rows(called)] == [
        (0, (RSP, 8)), (1, (RSP, 40)), (31, (RSP, 8))
    ]  # fmt: skip


def test_vdso_calls_are_unwound_through_r12():
    code = PUSH + bytes(4) + b"\x49\x89\xe4" + bytes(9) + b"\x4c\x89\xe4" + bytes(10)
    sizes = ((1, 0), (8, 8), (30, 24), (31, 8), (32, 0), (33, 24))
    made = rows(Made(b"runtime.nanotime1", code, sizes, flags=6))
    assert [(row[0], row[1]) for row in made] == [
        (0, (RSP, 8)), (1, (RSP, 16)), (8, (RSP, 32)), (11, (0x7C, 32)), (23, (RSP, 32)),
        (30, (RSP, 16)), (31, (RSP, 8)), (32, (RSP, 8)),
    ]  # fmt: skip
    assert made[-1][3] == UNKNOWN


@pytest.mark.parametrize("name", [b"runtime.asyncPreempt", b"runtime.cgocallback"])
def test_functions_not_entered_by_a_call_instruction_are_marked_as_signal_frames(name):
    file, table, segments = go_file([*[ORDINARY] * 10, ORDINARY._replace(name=name)])
    entries = decode(make_tables(file, table, TEXT, segments, ADDRESS, machine=X86_64).frames)
    assert "S" in str(entries.pop(max(entries)).cie.header.augmentation)
    assert all("S" not in str(entry.cie.header.augmentation) for entry in entries.values())


def test_functions_with_unknown_frame_layouts_have_no_table_entry():
    sigreturn = Made(b"runtime.sigreturn", bytes.fromhex("48c7c00f0000000f05"), ((9, 0),))
    other_language = Made(b"C.function", bytes(32), ())
    negative = Made(b"syscall.rawVforkSyscall", bytes(32), ((4, 0), (8, -8), (32, 0)))
    file, table, segments = go_file([*[ORDINARY] * 10, sigreturn, other_language, negative])
    assert len(make_tables(file, table, TEXT, segments, ADDRESS, machine=X86_64).pairs) == 10


@pytest.mark.parametrize("sizes", [((1 << 33, 0),), ((4, 0), (1 << 33, 8), (1 << 34, 0))])
def test_functions_longer_than_4_gib_are_rejected(sizes):
    with pytest.raises(ValueError, match="the row for a function is malformed"):
        rows(Made(b"main.large", PUSH + bytes(30), sizes))


def test_an_incorrect_text_start_is_corrected_based_on_the_code_or_rejected():
    assert rows(text=0) == rows()  # .text
    file, table, segments = go_file([ORDINARY] * 10, text=0)
    module = struct.pack("<Q", table.address) + bytes(21 * 8) + struct.pack("<Q", TEXT)
    data = Segment(len(file), len(module), 0x600000)
    maker = make_tables(file + module, table, TEXT - 32, [*segments, data], ADDRESS, machine=X86_64)
    assert maker.pairs[0][0] == TEXT
    with pytest.raises(ValueError, match=r"does not match \.gopclntab"):
        make_tables(file, table, TEXT - 32, segments, ADDRESS, machine=X86_64)


def test_go_function_tables_from_unsupported_versions_are_rejected():
    with pytest.raises(ValueError, match=r"unsupported \.gopclntab header"):
        rows(magic=0xFFFFFFFB)


def test_unwind_table_entries_for_c_code_are_kept_and_sorted():
    file, table, segments = go_file([ORDINARY] * 3)
    maker = make_tables(file, table, TEXT, segments, ADDRESS, machine=X86_64)
    packed = pack_tables(
        maker.pairs, bytes(maker.frames), struct.pack("<ii", TEXT + 40 - ADDRESS, 7), ADDRESS
    )
    (count,) = struct.unpack_from("<I", packed)
    pairs = list(struct.iter_unpack("<ii", packed[4 : 4 + 8 * count]))
    assert count == 4
    assert pairs == sorted(pairs)
    assert (TEXT + 40 - ADDRESS, 7) in pairs
    assert packed[4 + 8 * count :] == bytes(maker.frames)


@pytest.fixture
def children():
    children = Children()
    yield children
    children.stop()


class Target(NamedTuple):
    """An architecture that Go targets: its names and register numbers."""

    architecture: str
    machine: str
    return_address: int


X86, ARM64 = Target("amd64", "x86_64", RIP), Target("arm64", "aarch64", 30)


@pytest.mark.system
@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (X86, ()),
        (X86, ("-ldflags=-s",)),
        *further((X86, ("-buildmode=pie",)), (ARM64, ("-ldflags=-s",))),
    ],
)
def test_unwind_rows_match_debug_frame(tmp_path, target, flags, children):
    """Go's compiler writes the same frame sizes to ``.debug_frame``."""
    plain, path = tmp_path / "plain", tmp_path / "program"
    kept = [flag for flag in flags if flag != "-ldflags=-s"]
    variables = {**os.environ, "GOARCH": target.architecture, "CGO_ENABLED": "0"}
    for options, output in ((kept, plain), (flags, path)):
        subprocess.run(["go", "build", *options, "-o", output, WORK], check=True, env=variables)
    with path.open("rb") as file:
        source = FileSource(file.fileno(), path.stat().st_size)
        elf = read_elf(source, target.machine)
        assert elf.is_go
        names = {section.name for section in read_sections(source, elf)}
        (where,) = names & {b".gopclntab", b".data.rel.ro.gopclntab"}
        table, text = find_section(source, elf, where), find_section(source, elf, b".text")
        tables = index_go(file.fileno(), elf, table, text, None, children=children)
    entries = decode(tables.made_frames, tables.frames.address + tables.made_at)
    with plain.open("rb") as file:
        compared = sum(
            _compare(entry, entries[entry["initial_location"]], target.return_address)
            for entry in ELFFile(file).get_dwarf_info().CFI_entries()
            if isinstance(entry, FDE) and entry["initial_location"] in entries
        )
    assert compared > 2000
    # functions that switch stacks or pop large frames are not compared
    assert len(entries) <= compared + 60


def _compare(known, made, return_address):
    """Returns 1 if a function's rows match, 0 if it switches stacks or no code calls it."""
    theirs, ours = known.get_decoded().table, made.get_decoded().table
    rules = [row.get(return_address) for row in ours]
    if any(rule and rule.type != "OFFSET" for rule in rules):
        return 0
    if any(row["cfa"].expr is not None for row in ours) or "S" in str(made.cie["augmentation"]):
        return 0
    starts = [row["pc"] for row in theirs]
    for row, rule in zip(ours, rules, strict=True):
        other = theirs[bisect.bisect_right(starts, row["pc"]) - 1]
        assert row["cfa"].offset == other["cfa"].offset, hex(row["pc"])
        # If our rule reads the return address at sp, the linker's rule must do the same, or be
        # absent because the return address is in a register.
        if rule and rule.arg == -row["cfa"].offset:
            assert other[return_address].arg in {rule.arg, None}, hex(row["pc"])
    return 1


@pytest.mark.system
@pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed")
def test_c_code_in_a_static_go_program_is_unwound_with_the_rules_in_eh_frame(tmp_path, children):
    """A statically linked program has ``.eh_frame`` but no search table."""
    path = tmp_path / "program"
    command = ["go", "build", "-ldflags", "-linkmode external -extldflags -static", "-o", path, CGO]
    subprocess.run(command, check=True, env={**os.environ, "CGO_ENABLED": "1"})
    fd = os.open(path, os.O_RDONLY)
    opened = OpenedFile(fd, os.fstat(fd), str(path), "path", str(path))
    source = FileSource(fd, path.stat().st_size)
    code = loading.Code(source, read_elf(source), opened)
    loadable = loading.find_loadable(code, lambda make: make(children=children))
    image = bytearray(loadable.pages * PAGE_BYTES)
    loadable.fill(memoryview(image), 1)
    code.close()
    origin, _, entries = struct.unpack_from("=QQI", image, 8)
    starts = {
        origin + start for start, _ in struct.iter_unpack("=ii", image[256 : 256 + 8 * entries])
    }
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab")
        for name in ("runtime.main", "malloc"):
            assert {symbol["st_value"] for symbol in symbols.get_symbol_by_name(name)} <= starts


@pytest.mark.system
def test_a_malformed_table_is_read_once_and_rejected_with_a_reason(tmp_path, monkeypatch, children):
    file, table, segments = go_file([ORDINARY] * 3)
    path = tmp_path / "file"
    path.write_bytes(file[: table.offset] + bytes(table.size))
    elf = ElfFile(tuple(segments), (), None, None, 0, (0, 0, 0), X86_64)
    with path.open("rb") as opened:
        words = opened.fileno(), elf, table, Segment(0, 0, TEXT), None
        index = functools.partial(index_go, *words, children=children)
        with pytest.raises(TableRefused, match=r"unsupported \.gopclntab header"):
            index()
        monkeypatch.setattr(limited_children, "ServedChild", None)
        with pytest.raises(TableRefused, match=r"unsupported \.gopclntab header"):
            index()


NO_PUSH = Made(b"main.leaf", bytes(64), ((64, 0),))


@pytest.mark.parametrize(
    ("functions", "most"),
    [
        ([ORDINARY] * 250, 21),
        ([NO_PUSH, *[ORDINARY] * 249], 21),
        ([NO_PUSH] * 249 + [ORDINARY], 271),
    ],
    ids=["all push", "most push", "one pushes, which is not among the first looked at"],
)
def test_a_few_go_functions_suffice_to_locate_the_code(functions, most, monkeypatch):
    monkeypatch.setattr(go_frames, "_CHECKED", 10)
    file, table_at, segments = go_file(functions)
    table = Table(file[table_at.offset :], quantum=1)
    looked_at = []

    class CountedShapes(Shapes):
        def __getitem__(self, place):
            looked_at.append(place)
            return super().__getitem__(place)

    code, shapes = Code(file, segments), CountedShapes(table, go_x86.X86(table))
    assert find_text(table, table_at.address, code, TEXT + 0x100, shapes) == TEXT
    assert 0 < len(looked_at) <= most


FRAME_SIZES = st.lists(
    st.tuples(st.integers(1, 1 << 18) | st.integers(1, 16), st.sampled_from([0, 8, 40, 1 << 20])),
    min_size=1,
    max_size=12,
)


@given(FRAME_SIZES, st.binary(max_size=20) | st.just(b""))
@example([(1, 0), (4, 8), (60, 40), (4, 8), (1, 0), (70, 40), (4, 8), (1, 0), (9, 0)], b"")
@example([(1, 0), (4, 8), (60, 40), (4, 8), (1, 0)], b"")
@example([(20, 0)], b"")
def test_packed_frame_sizes_yield_the_same_shape_as_parsed_frame_sizes(lengths, damage):
    sizes = [(end, size) for end, (_, size) in zip(
        itertools.accumulate(length for length, _ in lengths), lengths, strict=True
    )]  # fmt: skip
    packed = damage.replace(b"\0", b"\1") + pack_sizes(sizes, 1)
    made = go_x86.X86.make_packed_shape(packed[: packed.index(0) + 1])
    file, table_at, _ = go_file([ORDINARY])
    machine = go_x86.X86(Table(file[table_at.offset :], quantum=1))
    if made is not None:
        assert made == machine.make_shape(parse_sizes(packed, 0, 1))
    else:
        assert damage or lengths[0][1] or any(a[1] == b[1] for a, b in itertools.pairwise(lengths))
