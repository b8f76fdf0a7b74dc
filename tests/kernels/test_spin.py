"""The profile of a kernel module that spins in a known call chain is exact."""

import platform
import subprocess
import time
from array import array
from pathlib import Path

import pytest
from guest.modules import KernelObject, insert_command, remove, spinning
from guest.sampled import drain_for, finish, sample, sampler

from otel_kprofiler.model import KERNEL_SIDE, RangeSource, Unresolved
from otel_kprofiler.symbols import KernelSymbolizer, StackResolver

pytestmark = pytest.mark.kernel

CHAIN = ("kprof_leaf", "kprof_mid", "kprof_thread", "kthread", "ret_from_fork")
if platform.machine() == "aarch64":
    # The kernel follows frame records. A leaf function creates no record, so its caller is missing.
    CHAIN = (CHAIN[0], *CHAIN[2:])
INSIDE = CHAIN[: CHAIN.index("kthread")]
INIT = ("kprof_init_leaf", "kprof_init_mid", "kprof_spin_init")


@pytest.fixture(autouse=True)
def _unloaded():
    yield
    remove()


def spin_stacks(symbolizer, samples, leaf):
    stacks = StackResolver({KERNEL_SIDE: symbolizer})
    results = [(s, stacks.resolve(s)) for s in samples if s.comm == b"kprof_spin"]
    return [(s, stack) for s, stack in results if stack.frames[0].function == leaf]


def check_frame(frame, file: KernelObject, name: str):
    assert frame.function == name
    assert frame.module.name == "kprof_spin"
    assert frame.module.build_id == file.build_id
    (place,) = file.functions[name]
    assert place.start <= frame.address < place.end
    assert frame.offset == frame.address - place.start


def test_the_call_chain_in_a_module_is_resolved():
    """Functions in modules are sampled with the right call chain, module, build id and RVA."""
    with spinning() as file:
        samples = sample(2)
        symbolizer = KernelSymbolizer.live()
    module = symbolizer.module("kprof_spin")
    assert module.range_source is RangeSource.SECTIONS
    stacks = spin_stacks(symbolizer, samples, CHAIN[0])
    assert len(stacks) >= 20
    for raw, stack in stacks:
        assert tuple(frame.function for frame in stack.frames[: len(CHAIN)]) == CHAIN
        for frame, name in zip(stack.frames, INSIDE, strict=False):
            check_frame(frame, file, name)
        pcs = array("Q", raw.words(KERNEL_SIDE))
        # Leaf addresses are exact; caller addresses are one byte before the return address.
        wanted = [pcs[0] - module.base, *(pc - 1 - module.base for pc in pcs[1 : len(INSIDE)])]
        assert [frame.address for frame in stack.frames[: len(INSIDE)]] == wanted


def test_samples_before_and_after_a_module_reload_have_the_correct_names():
    """After a module reload with different code, only new samples are named after the new code."""
    with spinning("spin") as first:
        symbolizer = KernelSymbolizer.live()
        before = sample(1)
    with spinning("other") as second:
        symbolizer.reload(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        after = sample(1)
    assert first.build_id != second.build_id
    old = spin_stacks(symbolizer, before, "kprof_leaf")
    new = spin_stacks(symbolizer, after, "kprof_other_leaf")
    assert len(old) >= 10
    assert len(new) >= 10
    for _, stack in old:
        for frame, name in zip(stack.frames, INSIDE, strict=False):
            check_frame(frame, first, name)
    for _, stack in new:
        for frame, name in zip(stack.frames, INSIDE, strict=False):
            check_frame(frame, second, name.replace("kprof_", "kprof_other_"))
    assert old[0][1].frames[0].module.generation < new[0][1].frames[0].module.generation


def test_addresses_of_an_unloaded_module_have_no_name():
    """The addresses of an unloaded module have no name."""
    with spinning():
        symbolizer = KernelSymbolizer.live()
        (leaf,) = symbolizer.find("kprof_leaf")
    symbolizer.reload(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    (frame,) = symbolizer.resolve_addresses([leaf.address])
    assert frame.unresolved is Unresolved.UNMAPPED
    assert symbolizer.module("kprof_spin") is None


def test_init_code_of_a_module_that_fails_to_load_is_never_misnamed():
    """Samples of an init function that fails are never misnamed, and its symbols are removed."""
    folder = Path("/sys/module/kprof_spin")
    with sampler() as running:
        loading = subprocess.Popen(
            insert_command(init_ms=60_000, fail_init=1), stderr=subprocess.PIPE, text=True
        )
        samples = drain_for(running, 1)
        symbolizer = KernelSymbolizer.live()
        init_text = int((folder / "sections/.init.text").read_text(), 16)
        samples += drain_for(running, 1) + finish(running)
        (folder / "parameters/init_ms").write_text("0")
        assert "No such device" in loading.communicate()[1]
    seen = 0
    stacks = StackResolver({KERNEL_SIDE: symbolizer})
    for raw in samples:
        frames = stacks.resolve(raw).frames
        for pc, frame in zip(array("Q", raw.words(KERNEL_SIDE)), frames, strict=True):
            if init_text <= pc < init_text + 4096:
                seen += 1
                assert frame.function in ("", *INIT)
    assert seen >= 20
    after = KernelSymbolizer.live()
    assert after.module("kprof_spin") is None
    assert not after.find("kprof_init_leaf")
