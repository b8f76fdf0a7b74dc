"""Names are correct while modules are loaded, unloaded, reloaded and sampled."""

import gc
import os
import random
import subprocess
import threading
import time
from array import array
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from guest.modules import insert, insert_command, remove, spinning
from guest.sampled import finish, sampler

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.host import Access, Uevents
from otel_kprofiler.model import KERNEL_SIDE, Unresolved
from otel_kprofiler.symbols import KernelSymbolizer, StackResolver
from otel_kprofiler.tracking import ModuleWatch

pytestmark = pytest.mark.kernel

CHAIN = ("kprof_leaf", "kprof_mid", "kprof_thread", "kthread", "ret_from_fork")
OTHER = tuple(name.replace("kprof_", "kprof_other_") for name in CHAIN[:3])
INIT = ("kprof_init_leaf", "kprof_init_mid", "kprof_spin_init")
HONEST = (Unresolved.NOT_YET_KNOWN, Unresolved.MODULE_GONE, Unresolved.UNMAPPED)
STORM = 20
CYCLES = int(os.environ.get("MATRIX_CYCLES", "50"))


def boot_ns():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.fixture(autouse=True)
def _unloaded():
    yield
    remove()


class Live:
    """A sampler and a symbolizer that tracks modules, used as in the pipeline."""

    def __init__(self, running):
        self.running = running
        access = Access()
        self.watch = ModuleWatch(access, Uevents, names_share=1)  # emulation is slow
        self.symbolizer = KernelSymbolizer.live(access, modules=self.watch)
        self.stacks = StackResolver({KERNEL_SIDE: self.symbolizer})
        self.resolved = []
        self._waiting = []

    def step(self, timeout_s=0.05):
        """Drains samples, advances the symbolizer, and resolves samples with complete symbols."""
        self.running.wait(timeout_s)
        self._waiting += self.running.drain()
        self.release(min(self.symbolizer.advance(boot_ns()), self.running.complete_until_ns()))

    def release(self, until_ns):
        for raw in [raw for raw in self._waiting if raw.time_ns < until_ns]:
            self.resolved.append((raw, self.stacks.resolve(raw)))
        self._waiting = [raw for raw in self._waiting if raw.time_ns >= until_ns]

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def run_until_named(self, function):
        """Steps until a function is sampled and named; loading names in a guest is slow."""
        end, seen = time.monotonic() + 3000, 0
        while seen < 20 and time.monotonic() < end:
            self.step()
            leaves = [stack.frames[:1] for _, stack in self.resolved]
            seen = sum(frame.function == function for frames in leaves for frame in frames)
        delays = Counter(
            (frame.module and frame.module.name, frame.unresolved)
            for raw, stack in self.resolved
            if raw.comm == b"insmod"
            for frame in stack.frames[:1]
        )
        assert seen >= 20, (delays, self.watch.counts)

    def end(self):
        self._waiting += finish(self.running)
        asked_ns, end = boot_ns(), time.monotonic() + 100
        while self.symbolizer.advance(boot_ns()) < asked_ns and time.monotonic() < end:
            time.sleep(0.01)
        self.release(boot_ns())

    def delay_ms(self, is_known):
        """Advances the symbolizer until a condition holds, and returns the elapsed milliseconds."""
        began = time.monotonic()
        while not is_known():
            assert time.monotonic() < began + 60
            self.symbolizer.advance(boot_ns())
            time.sleep(0.002)
        return (time.monotonic() - began) * 1e3

    def spins(self, start_ns, end_ns):
        return [
            stack.frames
            for raw, stack in self.resolved
            if raw.comm == b"kprof_spin" and start_ns <= raw.time_ns < end_ns
        ]


@contextmanager
def live():
    with sampler() as running:
        result = Live(running)
        try:
            result.run(0.3)
            yield result
        finally:
            result.symbolizer.close()


def test_modules_are_named_across_load_unload_and_reload(request):
    """Each sample has the names valid at its time; the delay after each load is measured."""
    metadata, names, phases = [], [], []
    with live() as host:
        for variant in ("spin", "other", "spin"):
            started_ns = boot_ns()
            with spinning(variant) as file:
                loaded_ns = boot_ns()
                metadata.append(host.delay_ms(lambda: host.symbolizer.module("kprof_spin")))
                (leaf,) = (n for n in (CHAIN[0], OTHER[0]) if n in file.functions)
                names.append(host.delay_ms(lambda n=leaf: host.symbolizer.find(n)))
                assert host.symbolizer.module("kprof_spin").build_id == file.build_id
                host.run(1)
                ended_ns = boot_ns()
            phases.append((started_ns, loaded_ns, ended_ns, boot_ns(), file))
            host.run(0.2)
        host.end()
        assert host.watch.counts.rescans == 0
        wrong, unnamed, right = check(host, phases)
    delays = f"{max(metadata):.0f} ms to file id and RVA, {max(names):.0f} ms to names"
    request.node.user_properties.append(("delay", delays))
    print(f"{delays}; {right} frames right, {unnamed} without a name")  # noqa: T201
    assert not wrong
    assert right >= 100
    # Frames sampled between the last scan and the announcement of a removal have no name.
    assert unnamed <= right / 2


@pytest.mark.one_boot
def test_rapid_module_loads_at_the_same_address_never_yield_a_wrong_name():
    """When two variants of a module alternate, addresses are not resolved until the next poll."""
    chance, phases = random.Random(1), []
    with live() as host:
        stop = threading.Event()

        def storm():
            try:
                for number in range(STORM):
                    started_ns = boot_ns()
                    with spinning(("spin", "other", "other", "spin")[number % 4]) as file:
                        loaded_ns = boot_ns()
                        # Every other module remains loaded long enough to be named.
                        time.sleep((3, 0)[number % 2] + chance.uniform(0, 0.3))
                        ended_ns = boot_ns()
                    phases.append((started_ns, loaded_ns, ended_ns, boot_ns(), file))
            finally:
                stop.set()

        loader = threading.Thread(target=storm)
        loader.start()
        while not stop.is_set():
            host.step()
        loader.join()
        host.end()
        wrong, unnamed, right = check(host, phases)
    print(f"{right} frames right, {unnamed} without a name")  # noqa: T201
    assert len(phases) == STORM
    assert not wrong
    assert right >= 20


def check(host, phases):
    """Returns frames with a wrong name, and the numbers of unnamed and correct frames."""
    wrong, unnamed, right = [], 0, 0
    for started_ns, _, _, gone_ns, file in phases:
        names = CHAIN if CHAIN[0] in file.functions else (*OTHER, *CHAIN[3:])
        for frames in host.spins(started_ns, gone_ns):
            if frames[0].unresolved is None and frames[0].function not in names:
                continue  # sampled outside the call chain
            for frame in frames:
                if frame.module is not None and frame.module.name != "kprof_spin":
                    break
                if not frame.function:
                    unnamed += 1
                    assert frame.unresolved in HONEST
                elif frame.module.build_id != file.build_id or frame.function not in names:
                    wrong.append(frame)
                else:
                    (place,) = file.functions[frame.function]
                    assert place.start <= frame.address < place.end
                    right += 1
    return wrong, unnamed, right


def test_a_long_running_init_function_is_named_while_it_runs_even_if_it_fails():
    """Init functions are symbolized while they run; if they fail, no symbols remain."""
    with live() as host:
        loading = subprocess.Popen(
            insert_command(init_ms=60_000, fail_init=1), stderr=subprocess.PIPE, text=True
        )
        host.run_until_named(INIT[0])
        init_text = int(Path("/sys/module/kprof_spin/sections/.init.text").read_text(), 16)
        Path("/sys/module/kprof_spin/parameters/init_ms").write_text("0")
        assert "No such device" in loading.communicate()[1]
        host.run(0.5)
        host.end()
        assert host.symbolizer.module("kprof_spin") is None
        named = others = 0
        for raw, stack in host.resolved:
            pcs = array("Q", raw.words(KERNEL_SIDE))
            for pc, frame in zip(pcs, stack.frames, strict=False):
                if init_text <= pc < init_text + 4096:
                    assert frame.function in ("", *INIT)
                    named += frame.function in INIT and frame.module.name == "kprof_spin"
                    others += not frame.function
    print(f"{named} frames in init code named, {others} without a name")  # noqa: T201
    assert named >= 20


@pytest.mark.one_boot
def test_functions_in_a_module_have_names_after_its_init_function_has_succeeded():
    """After init returns, the module's other functions have names; its identity is unchanged."""
    with live() as host:
        loading = subprocess.Popen(insert_command(init_ms=60_000), text=True)
        host.run_until_named(INIT[0])
        Path("/sys/module/kprof_spin/parameters/init_ms").write_text("0")
        assert loading.wait() == 0
        host.run(3)
        host.end()
        frames = [frame for _, stack in host.resolved for frame in stack.frames]
        assert any(frame.function == INIT[0] for frame in frames)
        assert any(frame.function == CHAIN[0] for frame in frames)
        assert host.symbolizer.find(CHAIN[0])
        assert not host.symbolizer.find(INIT[0])


class Late(Uevents):
    """A uevent socket that buffers one or two uevents and is read only while its gate is open."""

    def __init__(self):
        super().__init__(receive_bytes=1)
        self.gate = threading.Event()
        self.gate.set()

    def wait(self, timeout_s):
        self.gate.wait()
        super().wait(timeout_s)


def test_module_code_is_resolved_even_if_its_uevent_was_lost():
    """New code at a reused address is found even if its ksymbol record was lost."""
    announced = Late()
    watch = ModuleWatch(Access(), lambda: announced, names_share=1)
    symbolizer = KernelSymbolizer.live(Access(), modules=watch)

    def wait_for(function):
        end = time.monotonic() + 300
        while not symbolizer.find(function) and time.monotonic() < end:
            symbolizer.advance(boot_ns())
            time.sleep(0.01)
        return symbolizer.find(function)

    try:
        insert()
        (before,) = wait_for(CHAIN[0])
        announced.gate.clear()
        announced.wake()
        time.sleep(0.2)
        for _ in range(20):
            Path("/sys/devices/virtual/mem/null/uevent").write_text("change")
        remove()
        insert("other")
        announced.gate.set()
        (after,) = wait_for(OTHER[0])
        assert watch.counts.rescans >= 1
        assert before.module.base == after.module.base, "otherwise looking alone would find it"
        assert not symbolizer.find(CHAIN[0])
    finally:
        announced.gate.set()
        symbolizer.close()


@pytest.mark.one_boot
def test_load_and_unload_cycles_leak_nothing():
    """50 loads and unloads leak neither descriptors nor symbol tables."""
    watch = ModuleWatch(Access(), Uevents, names_share=0.2)
    symbolizer = KernelSymbolizer.live(Access(), modules=watch)
    try:
        for cycle in range(CYCLES):
            insert()
            symbolizer.advance(boot_ns())
            remove()
            symbolizer.advance(boot_ns())
            if cycle == 4:
                before = state(symbolizer)
        time.sleep(1)
        symbolizer.advance(boot_ns())
        after = state(symbolizer)
        assert after[0] <= before[0]  # ``before`` may include a descriptor open for reading names
        assert after[1] == before[1]
        assert after[2] <= before[2] + 64 * 1024
        assert symbolizer.module("kprof_spin") is None
        assert watch.counts.events == 2 * CYCLES
        assert watch.counts.restarts == 0
    finally:
        symbolizer.close()


def state(symbolizer):
    """Returns the number of open descriptors, the symbol table bytes and the resident KiB."""
    descriptors = []
    for _ in range(5):  # reading the names temporarily opens another descriptor
        time.sleep(0.2)
        symbolizer.advance(boot_ns())
        descriptors.append(len(os.listdir("/proc/self/fd")))
    gc.collect()
    return min(descriptors), symbolizer.snapshot.size_bytes(), read_resident_bytes() >> 10
