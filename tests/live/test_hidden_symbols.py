"""With hidden kallsyms, the BPF iterator yields the symbols that kallsyms shows to root."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from otel_kprofiler.host import Access
from otel_kprofiler.model import Level, ModuleKind
from otel_kprofiler.symbols import HiddenCause, KernelSymbolizer
from otel_kprofiler.tracking import IteratedKallsyms, find_hidden_symbols
from tests.public import TWO, as_nobody

pytestmark = pytest.mark.live

RESTRICT = Path("/proc/sys/kernel/kptr_restrict")
FRAMES = 10_000


def is_bpf(frame):
    return frame.module is not None and frame.module.kind is ModuleKind.BPF


@pytest.fixture
def load():
    commands = (
        ["dd", "if=/dev/zero", "of=/dev/null", "bs=64k"],
        ["sh", "-c", "while :; do cat /proc/self/maps /proc/stat > /dev/null; done"],
    )
    running = [
        subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        for command in commands
    ]
    yield
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def hidden(symbolizer):
    """Hides kernel addresses from all users during a test marked ``changes_host``."""
    before = RESTRICT.read_text()
    try:
        RESTRICT.write_text("2")
    except OSError as error:
        pytest.skip(f"{RESTRICT}: {error.strerror}")
    try:
        yield
    finally:
        RESTRICT.write_text(before)


# Prints why symbols are hidden. Then prints, for each kernel frame, the address, whether it is a
# leaf, and the name and start address resolved without root.
SAMPLE_FRAMES = """
import json, sys, time
from otel_kprofiler.host import Access
from otel_kprofiler.model import KERNEL_SIDE, ModuleKind
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.symbols import KernelSymbolizer, StackResolver
from otel_kprofiler.tracking import IteratedKallsyms
symbolizer = KernelSymbolizer.live(IteratedKallsyms(Access()))
stacks = StackResolver({KERNEL_SIDE: symbolizer})
sampler = EbpfSampler(SamplerConfig(samples_per_second=999))
sampler.start()
frames = []
end = time.monotonic() + 120
try:
    while len(frames) < int(sys.argv[1]) and time.monotonic() < end:
        sampler.wait(0.2)
        for sample in sampler.drain():
            pcs = memoryview(sample.words(KERNEL_SIDE)).cast("Q")
            resolved = stacks.resolve(sample).frames
            frames += [
                (pc, index == 0, frame.function, frame.address)
                for index, (pc, frame) in enumerate(zip(pcs, resolved, strict=True))
                if frame.module is None or frame.module.kind is not ModuleKind.BPF
            ]
finally:
    sampler.close()
print(json.dumps([symbolizer.hidden and symbolizer.hidden.name, frames]))
"""
LOOK = """
import json
from otel_kprofiler.host import Access
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import IteratedKallsyms
files = IteratedKallsyms(Access())
hidden = KernelSymbolizer.live(files).hidden
print(json.dumps([hidden and hidden.name, files.is_used, files.refused]))
"""

FIND = """
import json
from otel_kprofiler.host import Access
from otel_kprofiler.tracking import find_hidden_symbols
print(json.dumps(find_hidden_symbols(Access()).observed))
"""


def run_as_nobody(python, capabilities, code, *arguments):
    command = [*as_nobody(*capabilities), python.command, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.changes_host
def test_frames_have_the_names_in_roots_kallsyms(symbolizer, hidden, load, request, public_python):
    """10,000 kernel frames, sampled with only CAP_BPF and CAP_PERFMON, are compared."""
    assert KernelSymbolizer.live(Access()).hidden is HiddenCause.KPTR_RESTRICT
    cause, frames = run_as_nobody(public_python, TWO, SAMPLE_FRAMES, FRAMES)
    assert cause is None
    assert len(frames) >= FRAMES
    named = others = 0
    for pc, is_leaf, function, address in frames:
        (frame,) = symbolizer.resolve_addresses([pc], leaf_exact=is_leaf)
        if is_bpf(frame) or not frame.function:  # the program may have been unloaded
            others += 1
            continue
        assert (frame.function, frame.address) == (function, address), hex(pc)
        named += 1
    request.node.user_properties.append(("named", f"{named} of {len(frames) - others}"))
    assert named > 0.9 * len(frames)


@pytest.mark.changes_host
def test_the_bpf_iterator_lists_every_symbol_once(symbolizer, hidden):
    result = KernelSymbolizer.live(IteratedKallsyms(Access()))
    for name in ("", "__pfx_", "vfs_"):
        assert result.snapshot.symbol_count() > 10_000
        mine = result.snapshot.find(name or "schedule", prefix=bool(name))
        theirs = symbolizer.snapshot.find(name or "schedule", prefix=bool(name))
        assert [match[:3] for match in mine] == [match[:3] for match in theirs]


@pytest.mark.changes_host
def test_the_doctor_reports_that_hidden_addresses_are_read_with_the_bpf_iterator(hidden):
    finding = find_hidden_symbols(Access())
    assert finding.level is Level.OK
    assert "iterator" in finding.observed


def test_the_doctor_reports_nothing_if_symbols_are_visible(symbolizer):
    assert find_hidden_symbols(Access()) is None


@pytest.mark.changes_host
def test_the_reason_for_hidden_symbols_is_reported_without_capabilities(hidden, public_python):
    cause, is_used, refused = run_as_nobody(public_python, [], LOOK)
    assert cause == HiddenCause.KPTR_RESTRICT.name
    assert not is_used
    assert refused
    assert run_as_nobody(public_python, [], FIND) == "CAP_BPF and CAP_PERFMON missing"
