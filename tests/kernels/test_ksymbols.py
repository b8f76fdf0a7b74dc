"""Trampolines and pages that the kernel generates, tracked with minimal privileges."""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from guest.kernel_files import TRACING, kprobe_inside, sysctl, write
from guest.nobody import as_nobody

from otel_kprofiler.model import ModuleKind
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import KsymbolWatch, ReadMethod

sys.path.insert(0, str(Path(__file__).parents[1] / "live"))
from programs import attach_fentry, close_all, kallsyms, load

pytestmark = pytest.mark.kernel

BLOCKS = ("bpf", "__builtin__ftrace", "__builtin__kprobes")


@contextmanager
def watching():
    """Opens a symbolizer that tracks ksymbols. Asserts that kallsyms is read only at start-up."""
    watch = KsymbolWatch()
    symbolizer = KernelSymbolizer.live(ksymbols=watch)
    yield symbolizer, watch
    assert watch.counts().kallsyms_reads == 0
    assert watch.counts().lost == {}
    symbolizer.close()


def known(symbolizer):
    time.sleep(0.05)
    symbolizer.advance(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    return {(symbol.start, symbol.name) for symbol in symbolizer.ksymbols()}


def check(symbolizer, names, kind):
    """Checks that loaded symbols match kallsyms, and that ``names`` resolve within bounds."""
    there = kallsyms(*BLOCKS)
    assert known(symbolizer) == there
    results = [(start, name) for start, name in there if name.startswith(names)]
    assert results
    for start, name in results:
        (match,) = (m for m in symbolizer.find(name) if m.address == start)
        inside, past = symbolizer.resolve_addresses([start + 8, match.end + 1])
        assert (inside.function, inside.module.kind) == (name, kind)
        assert (inside.address, inside.offset) == (8, 8)
        assert past.module is None or past.module.base > start


def test_kprobe_pages_are_tracked_through_ksymbol_records():
    """Pages of kprobes inside functions receive the same names from records as in kallsyms."""
    with watching() as (symbolizer, watch), kprobe_inside("ksys_write"):
        check(symbolizer, "kprobe_", ModuleKind.OUT_OF_LINE)
        added = watch.counts().added
    assert added or "kprobe_insn_page" in {name for _, name in kallsyms(*BLOCKS)}


@pytest.mark.one_boot
def test_ftrace_trampolines_are_tracked_through_ksymbol_records():
    """Ftrace trampolines are resolved from ksymbol records until they are freed."""
    with watching() as (symbolizer, watch):
        before = known(symbolizer)
        instances = [Path(TRACING) / "instances" / f"kprof{number}" for number in range(2)]
        for instance in instances:
            instance.mkdir()
            write(f"{instance}/set_ftrace_filter", "vfs_read")
            write(f"{instance}/current_tracer", "function")
        check(symbolizer, "ftrace_trampoline", ModuleKind.OUT_OF_LINE)
        made = known(symbolizer) - before
        assert len([name for _, name in made if name == "ftrace_trampoline"]) >= 2
        assert watch.counts().added >= 2
        for instance in instances:
            write(f"{instance}/current_tracer", "nop")
            instance.rmdir()
        time.sleep(0.5)
        assert not made & known(symbolizer)
        assert known(symbolizer) == kallsyms(*BLOCKS)


@pytest.mark.one_boot
def test_trampolines_of_attached_programs_are_tracked_through_ksymbol_records():
    """The trampoline of a program attached to a function is named until it is removed."""
    with watching() as (symbolizer, _):
        link, program = attach_fentry("vfs_read")
        check(symbolizer, "bpf_trampoline_", ModuleKind.BPF)
        os.close(link)
        os.close(program)
        time.sleep(1)
        assert known(symbolizer) == kallsyms(*BLOCKS)


@pytest.mark.one_boot
def test_bpf_programs_and_subprograms_are_tracked_through_ksymbol_records():
    """Loaded programs and subprograms have the names and addresses listed in kallsyms."""
    with watching() as (symbolizer, _):
        fds = [load(number, functions=1 + number % 4) for number in range(50)]
        check(symbolizer, "bpf_prog_", ModuleKind.BPF)
        close_all(fds)
        time.sleep(0.5)
        assert known(symbolizer) == kallsyms(*BLOCKS)


def test_two_capabilities_suffice_to_list_every_bpf_program():
    """With only CAP_BPF and CAP_PERFMON, and kallsyms hidden, all BPF programs are listed."""
    fds = [load(number, functions=1 + number % 4) for number in range(50)]
    there = {symbol for symbol in kallsyms() if symbol[1].startswith("bpf_prog_")}

    def read():
        watch = KsymbolWatch()
        symbolizer = KernelSymbolizer.live(ksymbols=watch)
        result = known(symbolizer)
        symbolizer.close()
        return watch.method.name, result

    with sysctl("kernel.kptr_restrict", 2), sysctl("kernel.perf_event_paranoid", 2):
        method, result = as_nobody(("CAP_BPF", "CAP_PERFMON"), read)
    close_all(fds)
    assert method == ReadMethod.ITERATOR.name
    assert there <= result
