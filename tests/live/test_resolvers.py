"""User-supplied resolvers name the frames of samples from the running kernel."""

import sys

import pytest
from samplers import spawned

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import Access
from otel_kprofiler.model import USER_SIDE, Frame, Line, Side
from otel_kprofiler.pipeline import WindowSchedule, open_live, open_resources, open_symbols
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.symbols import lookup_addresses
from tests.waiting import wait_until

pytestmark = pytest.mark.live

# Runs without address randomization, so that both processes have the same addresses.
SPIN = ["setarch", "-R", sys.executable, "-S", "-c", "while True: pass"]


class OwnNames:
    """A resolver that names all code after the process that runs it."""

    def state(self, sample):
        return sample.process

    def resolve(self, raw, state):
        lines = (Line(f"code of {state.tgid}"),)
        addresses = lookup_addresses(raw.addresses())
        frames = [Frame(None, address, lines, 0, USER_SIDE) for address in addresses]
        return Side(USER_SIDE, tuple(frames), raw.status)

    def finish(self, timeout_s):
        pass

    def advance(self, now_boot_ns):
        return now_boot_ns

    def close(self):
        pass


@pytest.fixture
def spinning():
    with spawned(*SPIN) as first, spawned(*SPIN) as second:
        yield [first.pid, second.pid]


def test_user_frames_are_named_by_a_custom_resolver(spinning):
    access, clock, windows = Access(), Clock(), []
    pipeline = open_live(
        SamplerConfig(samples_per_second=999, stacks="both", target_pids=tuple(spinning)),
        WindowSchedule(10**8),
        windows.append,
        access=access,
        clock=clock,
        resources=open_resources(access, clock, {}),
        symbolizer=open_symbols(access),
        resolvers={USER_SIDE: OwnNames()},
    )
    pipeline.start()
    seen = {}

    def has_both():
        pipeline.step()
        for pid, stack in named(windows):
            seen.setdefault(pid, set()).update(stack)
        windows.clear()
        return set(seen) == set(spinning)

    wait_until(has_both)
    pipeline.stop()
    pipeline.close()
    assert seen == {pid: {f"code of {pid}"} for pid in spinning}


def named(windows):
    for window in windows:
        for resource, sample in window.samples:
            user = [f.function for f in sample.stack.frames if f.side is USER_SIDE]
            if user:
                yield resource.attributes["process.pid"], user
