"""Ksymbols are resolved by address and time, in tables and in stacks."""

import struct
from pathlib import Path

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    STACK_OK,
    AddressRange,
    BpfProgram,
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
    ModuleKind,
    RawSample,
    Unresolved,
)
from otel_kprofiler.symbols import CapturedFiles, KernelSymbolizer, StackResolver
from otel_kprofiler.symbols.kernel.bpf import KEEP_NS, MAX_KEPT, KsymbolTable
from otel_kprofiler.tracking.ksymbol_records import make_changes, parse_perf_records

CAPTURED = Path(__file__).parents[2] / "data/kernel/6.12-ksymbol"
BPF, OOL = ModuleKind.BPF, ModuleKind.OUT_OF_LINE
ADDED, REMOVED = KsymbolAction.ADDED, KsymbolAction.REMOVED
PROGRAMS_READ, ALL_READ = KsymbolAction.PROGRAMS_READ, KsymbolAction.ALL_READ
MS = 1_000_000
A = 0xFFFF_FFFF_C040_0000


def symbol(start, name, length=64, kind=BPF, **more):
    return Ksymbol(start, length, f"bpf_prog_{name}" if kind is BPF else name, kind, **more)


def table(*changes):
    result = KsymbolTable()
    for time_ns, action, *symbols in changes:
        result.apply(KsymbolChange(time_ns, action, tuple(symbols)))
    return result


def name_at(found, address, *time_ns):
    code = found.lookup(address, *time_ns)
    if code is not None and code.is_uncertain:
        return "?"
    return code and code.symbol.name.removeprefix("bpf_prog_")


class Source:
    """A source of prepared changes, with details of some symbols."""

    def __init__(self, details=None):
        self.changes = []
        self.details = details or {}
        self.described = []
        self.closed = False

    def poll(self, now_ns):
        changes, self.changes = self.changes, []
        return KsymbolBatch(changes, now_ns - 5)

    def describe(self, code):
        self.described.append(code.name)
        return self.details.get(code.name)

    def close(self):
        self.closed = True


def sample(time_ns, *pcs):
    stack = struct.pack(f"<{len(pcs)}Q", *pcs)
    return RawSample(
        ON_CPU, 1, time_ns, 0, 1, 1, 0, 0, b"", ((KERNEL_SIDE, STACK_OK),), (stack,), None
    )


@pytest.fixture
def live(tmp_path):
    """Returns a symbolizer with one kernel function, and the source of its symbol changes."""
    (tmp_path / "kallsyms").write_text(
        "ffffffff81000000 T _text\nffffffff81001000 T run\nffffffff81002000 T _etext\n"
        f"{A + 4096:x} t ftrace_trampoline\t[__builtin__ftrace]\n"
        f"{A:x} t bpf_prog_1_old\t[bpf]\n"
    )
    files = CapturedFiles({"/proc/kallsyms": tmp_path / "kallsyms"})
    source = Source()
    return KernelSymbolizer.live(files, ksymbols=source), source


def test_replaying_captured_records_yields_the_expected_table():
    """The records are from a 6.12 kernel that loads and unloads programs and a trampoline."""
    result = KsymbolTable()
    programs = make_changes(
        parse_perf_records((CAPTURED / "programs.records").read_bytes(), timed=False).records
    )
    trampoline, gone = make_changes(
        parse_perf_records((CAPTURED / "trampoline.records").read_bytes(), timed=False).records
    )
    for change in (*programs[:3], trampoline):
        result.apply(change)
    assert [(c.symbol.start, c.end, c.symbol.name) for c in result.live()] == [
        (0xFFFFFFFFC0400648, 0xFFFFFFFFC0400661, "bpf_prog_a04f5eef06a7f555_kprof_ks"),
        (0xFFFFFFFFC040068C, 0xFFFFFFFFC04006A8, "bpf_prog_b2715c0f7f689679_kprof_ks_sub"),
        (0xFFFFFFFFC04006E0, 0xFFFFFFFFC04006FC, "bpf_prog_8923dad831f6fb51_F"),
        (0xFFFFFFFFC0615000, 0xFFFFFFFFC06150E5, "ftrace_trampoline"),
    ]
    assert result.lookup(0xFFFFFFFFC0400661) is None, "past the end of the first"
    for change in (*programs[3:], gone):
        result.apply(change)
    assert result.live() == []


def test_a_reused_address_resolves_to_the_program_loaded_at_the_samples_timestamp():
    result = table(
        (10 * MS, ADDED, symbol(A, "one")),
        (30 * MS, REMOVED, symbol(A, "one")),
        (31 * MS, ADDED, symbol(A, "two", 128)),
    )
    assert name_at(result, A, 10 * MS - 1) is None
    assert name_at(result, A + 63, 10 * MS) == "one"
    assert name_at(result, A + 64, 20 * MS) is None
    assert name_at(result, A, 30 * MS - 1) == "one"
    assert name_at(result, A, 30 * MS + 1) == "one", "until the last CPU has left it"
    assert name_at(result, A, 31 * MS) == "two"
    assert name_at(result, A + 127) == "two"


def test_a_late_removal_record_does_not_remove_a_newer_symbol_at_the_same_address():
    """Records from two CPUs may be applied out of order."""
    result = table(
        (10, ADDED, symbol(A, "one")),
        (31, ADDED, symbol(A, "one", since_ns=31)),
        (30, REMOVED, symbol(A, "two")),
    )
    assert name_at(result, A) == "one"


def test_a_new_symbol_ends_the_lifetime_of_the_symbols_it_overlaps():
    result = table((10, ADDED, symbol(A, "one")), (20, ADDED, symbol(A + 32, "two")))
    assert name_at(result, A) is None
    assert name_at(result, A, 19) == "one"
    assert name_at(result, A + 32) == "two"


def test_a_full_read_of_ksymbols_removes_missing_symbols_and_adds_new_symbols():
    page = symbol(A + 8192, "kprobe_insn_page", 4096, OOL)
    result = table(
        (0, ALL_READ, symbol(A, "gone"), symbol(A + 64, "kept"), page),
        (100, PROGRAMS_READ, symbol(A + 64, "kept"), symbol(A + 128, "new", since_ns=70)),
    )
    assert [c.symbol.name for c in result.live()] == [
        "bpf_prog_kept", "bpf_prog_new", "kprobe_insn_page"
    ]  # fmt: skip
    assert name_at(result, A, 99) == "gone"
    assert name_at(result, A + 128, 69) is None
    assert name_at(result, A + 128, 70) == "new"
    result.apply(KsymbolChange(200, ALL_READ, (symbol(A + 64, "kept"),)))
    assert [c.symbol.name for c in result.live()] == ["bpf_prog_kept"]


def test_a_slow_read_does_not_undo_concurrent_changes():
    """A read is timestamped at its start, although it may include changes that occur later."""
    result = table(
        (0, ALL_READ, symbol(A, "a"), symbol(A + 64, "b")),
        (150, REMOVED, symbol(A, "a")),
        (160, ADDED, symbol(A + 128, "c")),
        (100, ALL_READ, symbol(A, "a"), symbol(A + 64, "b")),
    )
    assert [c.symbol.name for c in result.live()] == ["bpf_prog_b", "bpf_prog_c"]


def test_a_delayed_read_does_not_displace_newer_symbols_at_a_reused_address():
    result = table(
        (0, ALL_READ, symbol(A, "a")),
        (150, REMOVED, symbol(A, "a")),
        (160, ADDED, symbol(A + 32, "b")),
        (120, PROGRAMS_READ, symbol(A, "a"), symbol(A + 48, "never_seen")),
        (170, REMOVED, symbol(A + 640, "unseen")),
    )
    assert [c.symbol.name for c in result.live()] == ["bpf_prog_b"]
    assert name_at(result, A, 149) == "a"
    assert name_at(result, A + 640, 169) == "unseen"


def test_the_history_remains_sorted_if_an_older_read_is_processed_late():
    """A lookup scans the history backwards and stops at the requested time."""
    result = table(
        (0, ALL_READ, symbol(A, "a"), symbol(A + 8192, "kprobe_insn_page", 4096, OOL)),
        (900 * MS, REMOVED, symbol(A, "a")),
        (100 * MS, ALL_READ, symbol(A, "a")),
    )
    assert name_at(result, A, 800 * MS) == "a"
    assert name_at(result, A + 8192, 99 * MS) == "kprobe_insn_page"
    assert name_at(result, A + 8192, 120 * MS) is None


def test_a_removal_record_names_a_symbol_whose_load_record_was_lost():
    """The symbol is missing from the last read, so it must have been loaded later."""
    result = table((100, PROGRAMS_READ), (300, REMOVED, symbol(A, "unseen")))
    assert name_at(result, A, 200) == "unseen"
    assert name_at(result, A, 99) is None
    assert name_at(result, A) is None


def lost(since_ns, until_ns):
    return KsymbolChange(since_ns, KsymbolAction.LOST, until_ns=until_ns)


def test_no_names_are_guessed_between_lost_records_and_the_next_full_read():
    """After a loss, only programs loaded at a known time are named until the next full read."""
    result = table((0, ALL_READ, symbol(A, "old"), symbol(A + 64, "kept"), symbol(A + 128, "left")))
    result.apply(lost(100, 120))
    for offset in (0, 64, 128):
        assert name_at(result, A + offset, 99) in ("old", "kept", "left")
        assert name_at(result, A + offset, 100) == "?", "it may be gone"
    read = symbol(A, "new"), symbol(A + 64, "kept"), symbol(A + 192, "timed", since_ns=150)
    result.apply(KsymbolChange(200, PROGRAMS_READ, read))
    assert [name_at(result, A, time_ns) for time_ns in (99, 100, 199, 200)] == [
        "old", "?", "?", "new"
    ]  # fmt: skip
    assert [name_at(result, A + 64, time_ns) for time_ns in (99, 150, 200)] == ["kept"] * 3
    assert [name_at(result, A + 128, time_ns) for time_ns in (99, 199)] == ["left", "?"]
    assert name_at(result, A + 128, 200 + 11 * MS) is None
    assert [name_at(result, A + 192, time_ns) for time_ns in (99, 149, 150)] == [None, "?", "timed"]


def test_a_reloaded_program_is_distinguished_from_its_predecessor():
    result = table((0, ALL_READ, symbol(A, "a", since_ns=5)))
    result.apply(lost(100, 120))
    result.apply(KsymbolChange(200, PROGRAMS_READ, (symbol(A, "a", since_ns=150),)))
    assert [name_at(result, A, time_ns) for time_ns in (99, 149, 150)] == ["a", "?", "a"]


def test_after_lost_records_trampolines_are_unnamed_until_the_next_full_read():
    page = symbol(A + 8192, "ftrace_trampoline", 4096, OOL)
    result = table((0, ALL_READ, page))
    result.apply(lost(100, 120))
    result.apply(KsymbolChange(200, PROGRAMS_READ, ()))
    assert name_at(result, A + 8192, 250) == "?"
    result.apply(KsymbolChange(300, ALL_READ, (page,)))
    assert name_at(result, A + 8192, 250) == "ftrace_trampoline"


def test_only_reads_started_after_a_loss_is_detected_restore_names():
    result = table((0, ALL_READ, symbol(A, "a")))
    result.apply(lost(100, 220))
    result.apply(KsymbolChange(200, PROGRAMS_READ, (symbol(A, "a"),)))
    assert [name_at(result, A, time_ns) for time_ns in (199, 200)] == ["a", "?"]
    result.apply(KsymbolChange(210, ADDED, (symbol(A + 64, "b", since_ns=210),)))
    assert name_at(result, A + 64, 215) == "?", "its removal may have been lost"
    result.apply(KsymbolChange(230, PROGRAMS_READ, (symbol(A, "a"), symbol(A + 64, "b"))))
    assert (name_at(result, A), name_at(result, A + 64, 215)) == ("a", "b")


def test_code_whose_load_record_was_lost_is_uncertain_between_the_loss_and_its_removal():
    result = table((50, PROGRAMS_READ))
    result.apply(lost(100, 120))
    result.apply(KsymbolChange(115, REMOVED, (symbol(A, "unseen"),)))
    assert [name_at(result, A, time_ns) for time_ns in (60, 99, 110)] == [None, None, "?"]


def test_a_removal_does_not_prove_that_the_symbol_stayed_loaded_since_the_loss():
    """The program may have been unloaded and reloaded."""
    result = table((0, ALL_READ, symbol(A, "a")))
    result.apply(lost(100, 120))
    result.apply(KsymbolChange(115, REMOVED, (symbol(A, "a"),)))
    assert [name_at(result, A, time_ns) for time_ns in (99, 110)] == ["a", "?"]


def test_frames_are_reported_as_unresolved_after_ksymbol_records_are_lost(live):
    symbolizer, source = live
    stacks = StackResolver({KERNEL_SIDE: symbolizer})
    source.changes = [lost(20 * MS, 40 * MS)]
    first = stacks.resolve(sample(10 * MS, A + 8))
    symbolizer.advance(50 * MS)
    doubtful = stacks.resolve(sample(30 * MS, A + 8))
    assert doubtful is stacks.resolve(sample(31 * MS, A + 8))
    assert first.frames[0].function == "bpf_prog_1_old"
    assert doubtful.frames[0].unresolved is Unresolved.RECORDS_LOST
    assert symbolizer.explain(A + 8).names == ()
    source.changes = [KsymbolChange(60 * MS, ALL_READ, (Ksymbol(A, 64, "bpf_prog_1_old", BPF),))]
    symbolizer.advance(70 * MS)
    assert stacks.resolve(sample(30 * MS, A + 8)).frames[0].function == "bpf_prog_1_old"


def test_a_symbol_without_a_size_ends_at_the_next_symbol():
    result = table(
        (0, ALL_READ, symbol(A, "a", 0), symbol(A + 80, "b", 0), symbol(A + 8192, "t", 0, OOL))
    )
    assert name_at(result, A + 79) == "a"
    assert name_at(result, A + 80) == "b"
    assert name_at(result, A + 8192 + 4095) == "t"
    assert name_at(result, A + 8192 + 4096) is None
    result.apply(KsymbolChange(5, PROGRAMS_READ, (symbol(A, "a", 64), symbol(A + 80, "b", 64))))
    assert name_at(result, A + 64) is None, "now its length is known"


def test_addresses_on_every_page_of_a_large_bpf_program_are_resolved():
    result = table((1, ADDED, symbol(A, "large", 3 * 4096 + 5)))
    for offset in (0, 4096, 3 * 4096 + 4):
        assert name_at(result, A + offset) == "large"
    result.apply(KsymbolChange(2, REMOVED, (symbol(A, "large", 3 * 4096 + 5),)))
    for offset in (0, 4096, 3 * 4096 + 4):
        assert name_at(result, A + offset) is None


def test_the_symbol_history_is_bounded_in_size_and_age():
    result, step_ns = KsymbolTable(), KEEP_NS // (4 * MAX_KEPT)
    for number in range(2 * MAX_KEPT):
        for action in (ADDED, REMOVED):
            result.apply(KsymbolChange(step_ns * number, action, (symbol(A, f"{number}"),)))
    last = 2 * MAX_KEPT - 1
    assert name_at(result, A, step_ns * last) == f"{last}"
    assert name_at(result, A, step_ns * (last - MAX_KEPT)) is None, "too many to keep"
    result.apply(KsymbolChange(step_ns * last + 2 * KEEP_NS, ADDED, (symbol(A, "x"),)))
    assert name_at(result, A, step_ns * last) is None, "too old to keep"


def test_a_frame_has_the_same_kind_as_its_symbol(live):
    symbolizer, source = live
    name = "bpf_prog_2222222222222222_new"
    program = BpfProgram(7, "kprobe", "2" * 16, 5, "vfs_read")
    source.details[name] = KsymbolDetails(program, ((0, "a.c", 3), (16, "b.h", 9)))
    source.changes = [KsymbolChange(10, ADDED, (Ksymbol(A + 64, 40, name, BPF, 10, 7),))]
    assert symbolizer.advance(20) == 15, "the watermark of the source"
    frame, caller, page = symbolizer.resolve_addresses([A + 64, A + 64 + 20, A + 4096 + 8])
    assert (frame.module.kind, frame.address, frame.offset) == (ModuleKind.BPF, 0, 0)
    assert (frame.lines[0].function, frame.lines[0].file) == (name, "a.c")
    assert frame.lines[0].line == 3
    assert caller.lines[0].line == 9
    assert caller.module is frame.module
    assert frame.module.program == program
    assert frame.module.ranges == (AddressRange(A + 64, A + 104, name),)
    assert (page.function, page.module.kind) == ("ftrace_trampoline", OOL)
    assert source.described.count(name) == 1
    symbolizer.close()
    assert source.closed


def test_stacks_track_program_loads_and_never_show_a_stale_name(live):
    """A raw stack looked up at five times resolves to the same object until the code changes."""
    symbolizer, source = live
    stacks = StackResolver({KERNEL_SIDE: symbolizer})
    new = Ksymbol(A, 64, "bpf_prog_2_new", BPF, 30)
    source.changes = [
        KsymbolChange(20 * MS, REMOVED, (Ksymbol(A, 64, "bpf_prog_1_old", BPF),)),
        KsymbolChange(40 * MS, ADDED, (new._replace(since_ns=40 * MS),)),
    ]
    before = stacks.resolve(sample(10 * MS, A + 8, 0xFFFFFFFF81001010))
    symbolizer.advance(50 * MS)
    names, last = {}, None
    for time_ns in (10, 15, 35, 45, 46):
        stack = stacks.resolve(sample(time_ns * MS, A + 8, 0xFFFFFFFF81001010))
        names[time_ns] = [frame.function for frame in stack.frames]
        if time_ns == 15:
            assert stack is before
        if time_ns == 46:
            assert stack is last
        last = stack
    old, new_names = ["bpf_prog_1_old", "run"], ["bpf_prog_2_new", "run"]
    assert names == {10: old, 15: old, 35: ["", "run"], 45: new_names, 46: new_names}


def test_a_resolved_name_is_kept_after_the_symbol_history_expires(live):
    symbolizer, source = live
    stacks = StackResolver({KERNEL_SIDE: symbolizer})
    source.changes = [
        KsymbolChange(1, PROGRAMS_READ, (Ksymbol(A, 64, "bpf_prog_1_old", BPF, 1),)),
        KsymbolChange(20, REMOVED, (Ksymbol(A, 64, "bpf_prog_1_old", BPF),)),
    ]
    symbolizer.advance(30)
    first = stacks.resolve(sample(10, A + 8, A + 99))
    late = Ksymbol(A + 640, 64, "bpf_prog_3_x", BPF)
    source.changes = [KsymbolChange(20 + 3 * KEEP_NS, ADDED, (late,))]
    symbolizer.advance(3 * KEEP_NS)
    assert stacks.resolve(sample(10, A + 8, A + 99)) is first
    assert first.frames[0].function == "bpf_prog_1_old"


def test_modules_take_precedence_over_ksymbols(live):
    symbolizer, source = live
    inside = Ksymbol(0xFFFFFFFF81001000, 64, "bpf_prog_9_evil", BPF)
    source.changes = [KsymbolChange(1, ADDED, (inside,))]
    symbolizer.advance(10)
    (frame,) = symbolizer.resolve_addresses([0xFFFFFFFF81001000])
    assert frame.function == "run"


def test_find_and_explain_include_ksymbols(live):
    symbolizer, source = live
    symbolizer.advance(10)
    (match,) = symbolizer.find("bpf_prog_1_old")
    assert match.address == A
    assert "no length" in symbolizer.explain(A + 4).reason
    source.changes = [KsymbolChange(20, PROGRAMS_READ, (symbol(A, "1_old"),))]
    symbolizer.advance(30)
    known = symbolizer.explain(A + 4)
    assert (known.names, known.start, known.end) == (("bpf_prog_1_old",), A, A + 64)
    assert symbolizer.find("bpf_prog_", prefix=True)[0].end == A + 64
    assert symbolizer.explain(A + 64).names == ()
