"""KernelSymbolizer resolves leaves and callers, and handles caching, history and errors."""

import os
import struct
import weakref

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    STACK_OK,
    USER_SIDE,
    FrameSource,
    ModuleKind,
    RawSample,
    StackEnd,
    Unresolved,
    pack_user_stack,
)
from otel_kprofiler.symbols import HiddenCause, KernelSymbolizer, StackResolver
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.kernel.read import read_pieces
from otel_kprofiler.symbols.kernel.symbolizer import MAX_HISTORY

KALLSYMS = """\
ffffffff81000000 T _stext
ffffffff81000000 T _text
ffffffff81000100 T first
ffffffff81000200 t second.isra.0
ffffffff81000300 T __irqentry_text_start
ffffffff81000300 t irq_entry
ffffffff81000400 T __irqentry_text_end
ffffffff81000500 T _etext
ffffffffc0001000 t ftrace_trampoline\t[__builtin__ftrace]
ffffffffc0005000 t bpf_prog_0123456789abcdef_probe\t[bpf]
"""
BASE = 0xFFFFFFFF81000000


def sample(*kernel, user=(), time_ns=10):
    collected, stacks = ((KERNEL_SIDE, STACK_OK),), (struct.pack(f"{len(kernel)}Q", *kernel),)
    if user:
        collected += ((USER_SIDE, STACK_OK),)
        stacks += (pack_user_stack(StackEnd.COMPLETE, [(pc, None, source) for pc, source in user]),)
    return RawSample(ON_CPU, 1, time_ns, 0, 1, 1, None, 1, b"x", collected, stacks, None)


def resolver(symbolizer):
    return StackResolver({KERNEL_SIDE: symbolizer})


def make_host(root, kallsyms=KALLSYMS, **files):
    for path, content in {"proc/kallsyms": kallsyms, **files}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return Access(str(root))


@pytest.fixture
def host(tmp_path):
    return make_host(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "the last line is truncated"),
        (lambda text: text[:82], "_etext is missing"),
        (lambda text: text.replace(" _etext", " _etex"), "_etext is missing"),
        (lambda text: text.replace("T first", "TT first"), "1 of 10 lines are malformed"),
    ],
)
def test_a_malformed_kallsyms_is_reported(tmp_path, damage, message):
    symbolizer = KernelSymbolizer.live(make_host(tmp_path, damage(KALLSYMS)))
    assert any(message in problem for problem in symbolizer.problems), symbolizer.problems


def test_no_problems_are_reported_for_an_intact_kallsyms(host):
    problems = KernelSymbolizer.live(host).problems
    assert not [problem for problem in problems if problem.startswith("/proc/kallsyms")]


def test_leaves_are_looked_up_by_exact_address_and_callers_by_return_address_minus_one(host):
    symbolizer = KernelSymbolizer.live(host)
    leaf, caller = symbolizer.resolve_addresses([BASE + 0x200, BASE + 0x200])
    assert (leaf.function, leaf.address, leaf.offset) == ("second", 0x200, 0)
    assert (caller.function, caller.address, caller.offset) == ("first", 0x1FF, 0xFF)
    (caller,) = symbolizer.resolve_addresses([BASE + 0x200], leaf_exact=False)
    assert caller.function == "first"
    assert leaf.lines[0].system_name == "second.isra.0"


def test_kernel_frames_precede_user_frames_in_a_sample(host):
    user = [(0x5000, FrameSource.REGISTERS), (0x6000, FrameSource.TABLE)]
    taken = sample(BASE + 0x110, BASE + 0x210, user=user)
    stack = resolver(KernelSymbolizer.live(host)).resolve(taken)
    assert [frame.function for frame in stack.frames] == ["first", "second", "", ""]
    assert [frame.address for frame in stack.frames] == [0x110, 0x20F, 0x5000, 0x5FFF]
    assert stack.frames[2].side is USER_SIDE
    assert stack.frames[2].unresolved is Unresolved.USER_ADDRESS
    assert [side.kind.name for side in stack.sides] == ["kernel", "user"]
    assert [side.status for side in stack.sides] == [STACK_OK, STACK_OK]


def test_stack_and_frame_objects_are_shared_while_symbols_are_unchanged(host):
    stacks = resolver(KernelSymbolizer.live(host))
    one = stacks.resolve(sample(BASE + 0x110, BASE + 0x210))
    assert stacks.resolve(sample(BASE + 0x110, BASE + 0x210, time_ns=99)) is one
    other = stacks.resolve(sample(BASE + 0x110, BASE + 0x211))
    assert other is not one
    assert other.frames[0] is one.frames[0]


def test_trailing_bytes_of_a_truncated_stack_are_dropped(host):
    torn = sample(BASE + 0x110)._replace(stacks=(struct.pack("Q", BASE + 0x110) + b"\xff" * 5,))
    assert len(resolver(KernelSymbolizer.live(host)).resolve(torn).frames) == 1


def test_samples_are_resolved_with_the_symbols_at_their_timestamp(tmp_path):
    symbolizer = KernelSymbolizer.live(make_host(tmp_path))
    stacks = resolver(symbolizer)
    before = stacks.resolve(sample(BASE + 0x110, time_ns=10))
    vmlinux = symbolizer.module("vmlinux")
    make_host(tmp_path, KALLSYMS.replace("first", "renamed"))
    symbolizer.reload(now_boot_ns=100)
    assert symbolizer.snapshot.generation == 2
    assert stacks.resolve(sample(BASE + 0x110, time_ns=99)) is before
    assert stacks.resolve(sample(BASE + 0x110, time_ns=100)).frames[0].function == "renamed"
    assert symbolizer.resolve_addresses([BASE + 0x110], time_ns=5)[0].function == "first"
    assert symbolizer.module("vmlinux") is vmlinux, "an unchanged module stays the same object"


def test_the_number_of_retained_snapshots_is_bounded(tmp_path):
    symbolizer = KernelSymbolizer.live(make_host(tmp_path))
    for now in range(100):
        make_host(tmp_path, KALLSYMS.replace("first", f"first_{now}"))
        symbolizer.reload(now)
    names = {symbolizer.resolve_addresses([BASE + 0x110], time_ns=t)[0].function for t in range(99)}
    assert names == {f"first_{now}" for now in range(99 - MAX_HISTORY, 99)}


def test_gaps_and_unknown_addresses_remain_unresolved_with_a_reason(host):
    symbolizer = KernelSymbolizer.live(host)
    (gap,) = symbolizer.resolve_addresses([BASE + 0x480])
    assert (gap.module.name, gap.address, gap.lines) == ("vmlinux", 0x480, ())
    assert gap.unresolved is Unresolved.NO_SYMBOL
    (outside,) = symbolizer.resolve_addresses([BASE + 0x500])
    assert (outside.module, outside.address) == (None, BASE + 0x500)
    assert outside.unresolved is Unresolved.UNMAPPED


def test_bpf_programs_and_trampolines_are_separate_modules(host):
    symbolizer = KernelSymbolizer.live(host)
    (bpf,) = symbolizer.resolve_addresses([0xFFFFFFFFC0005010])
    assert bpf.module.kind is ModuleKind.BPF
    assert bpf.module.name == bpf.function == "bpf_prog_0123456789abcdef_probe"
    assert bpf.address == 0x10
    assert symbolizer.resolve_addresses([0xFFFFFFFFC0005020])[0].module is bpf.module
    explained = symbolizer.explain(0xFFFFFFFFC0005010)
    assert (explained.names, explained.start) == ((bpf.function,), 0xFFFFFFFFC0005000)
    (trampoline,) = symbolizer.resolve_addresses([0xFFFFFFFFC0001FFF])
    assert trampoline.function == "ftrace_trampoline"
    assert trampoline.module.kind is ModuleKind.OUT_OF_LINE
    (past,) = symbolizer.resolve_addresses([0xFFFFFFFFC0002000])
    assert past.unresolved is Unresolved.UNMAPPED
    assert symbolizer.find("bpf_prog_", prefix=True)[0].address == 0xFFFFFFFFC0005000


def test_names_resolve_to_addresses(host):
    symbolizer = KernelSymbolizer.live(host)
    assert [match.rva for match in symbolizer.find("first")] == [0x100]
    assert symbolizer.find("second") == ()
    assert [match.name for match in symbolizer.find("second", prefix=True)] == ["second.isra.0"]
    assert symbolizer.find("_etext")[0].address == BASE + 0x500
    assert symbolizer.find("") == ()
    assert symbolizer.module("ext4") is None


def test_an_interrupt_range_may_start_at_the_address_of_a_function(host):
    symbolizer = KernelSymbolizer.live(host)
    (irq,) = symbolizer.snapshot.interrupt_ranges()
    assert irq == (BASE + 0x300, BASE + 0x400, "irqentry")
    assert symbolizer.resolve_addresses([BASE + 0x300])[0].function == "irq_entry"


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"proc/sys/kernel/kptr_restrict": "2\n"}, HiddenCause.KPTR_RESTRICT),
        ({"proc/sys/kernel/kptr_restrict": "1\n"}, HiddenCause.NO_CAP_SYSLOG),
        ({"proc/sys/kernel/kptr_restrict": "0\n"}, HiddenCause.NO_CAP_SYSLOG),
        ({}, HiddenCause.NO_CAP_SYSLOG),
    ],
)
def test_hidden_symbols_are_reported_with_cause_and_fix_and_are_not_fatal(tmp_path, files, cause):
    zeros = "".join("0" * 16 + line[16:] + "\n" for line in KALLSYMS.splitlines())
    modules = "m 4096 0 - Live 0x0000000000000000\n"
    symbolizer = KernelSymbolizer.live(
        make_host(tmp_path, zeros, **files, **{"proc/modules": modules})
    )
    assert symbolizer.hidden is cause
    assert cause.value
    assert cause.fix
    (frame,) = symbolizer.resolve_addresses([BASE])
    assert (frame.module, frame.address) == (None, BASE)
    assert frame.unresolved is Unresolved.HIDDEN
    assert symbolizer.explain(BASE).reason == cause.value


def test_a_host_without_kallsyms_has_no_symbols(tmp_path):
    symbolizer = KernelSymbolizer.live(Access(str(tmp_path)))
    assert symbolizer.hidden is HiddenCause.NO_FILE
    assert symbolizer.snapshot.modules == ()
    assert symbolizer.snapshot.interrupt_ranges() == ()
    assert symbolizer.find("x") == ()


def test_an_empty_or_unreadable_kallsyms_is_reported(tmp_path):
    assert KernelSymbolizer.live(make_host(tmp_path, "")).hidden is HiddenCause.UNREADABLE
    (tmp_path / "proc" / "kallsyms").unlink()
    (tmp_path / "proc" / "kallsyms").mkdir()
    symbolizer = KernelSymbolizer.live(Access(str(tmp_path)))
    assert symbolizer.hidden is HiddenCause.UNREADABLE
    assert "Is a directory" in symbolizer.problems[0]


def test_explain_shows_all_names_for_an_address(host):
    explained = KernelSymbolizer.live(host).explain(BASE + 0x301)
    assert explained.names == ("irq_entry", "__irqentry_text_start")
    assert (explained.start, explained.end) == (BASE + 0x300, BASE + 0x400)
    assert explained.section == ".text"
    assert explained.reason


def test_read_pieces_closes_its_descriptor_even_when_abandoned(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 5_000_000)
    before = set(os.listdir("/proc/self/fd"))
    pieces = read_pieces(os.open(tmp_path / "f", os.O_RDONLY))
    next(pieces)
    pieces.close()
    assert sum(map(len, read_pieces(os.open(tmp_path / "f", os.O_RDONLY)))) == 5_000_000
    assert set(os.listdir("/proc/self/fd")) <= before


def test_read_errors_are_raised_to_the_caller(tmp_path):
    with pytest.raises(IsADirectoryError):
        list(read_pieces(os.open(tmp_path, os.O_RDONLY)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(read_pieces(-1))


class Value:
    """A value whose deletion a weak reference can detect."""

    def __init__(self, key):
        self.key = key


def test_the_cache_is_bounded_and_keeps_recently_used_entries():
    alive, computed = weakref.WeakSet(), []

    def compute(key):
        computed.append(key)
        alive.add(value := Value(key))
        return value

    cache = BoundedCache(100, compute)
    for key in range(1000):
        assert cache[key].key == key
        assert cache[0].key == 0
        assert len(alive) <= 101
    assert computed.count(0) == 1


def test_a_cache_with_large_keys_is_bounded_by_the_size_of_the_keys():
    alive = weakref.WeakSet()

    def compute(key):
        alive.add(value := Value(key))
        return value

    cache = BoundedCache(1000, compute, weigh=len, max_weight=100)
    for number in range(200):
        key = b"%04d" % number * 5
        assert cache[key].key == key
        assert sum(len(value.key) for value in alive) <= 120
    assert cache[b"x" * 500].key == b"x" * 500
