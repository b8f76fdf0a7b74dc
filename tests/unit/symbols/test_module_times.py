"""An address is attributed to a module only for times when the module is known to be loaded."""

import random

import pytest
from module_host import TEXT, Host, frame, read_captured, settle

from otel_kprofiler.model import RangeSource, Unresolved
from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import ModuleWatch
from otel_kprofiler.tracking.module_uevents import ModuleAction
from otel_kprofiler.tracking.module_watch import MAX_ATTEMPTS
from tests.waiting import wait_until

MS = 1_000_000
BEGAN_NS = 1_000_000 * MS


@pytest.fixture
def clock(clock):
    clock.ns = BEGAN_NS
    return clock


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def symbolizer(host, clock):
    host.load("old", announce=False)
    watch = ModuleWatch(host.files, lambda: host.events, names_share=1, now_ns=clock)
    result = KernelSymbolizer.live(host.files, modules=watch)
    settle(result, now_ns=clock)
    host.finish_scan()  # a scan in progress could see a module before a test announces it
    yield result
    result.close()


def test_code_sampled_between_the_last_read_and_a_late_uevent_is_unnamed(host, symbolizer, clock):
    """Another module is loaded at the address before the first module's removal is received."""
    clock.ns += 10 * MS
    settle(symbolizer, now_ns=clock)
    seen_ns = clock.ns
    clock.ns += 5 * MS
    host.unload("old", announce=False)
    host.load("fresh", announce=False)
    clock.ns += 20 * MS
    host.events.announce("remove", "old")
    host.events.announce("add", "fresh")
    settle(symbolizer, now_ns=clock)
    told_ns = clock.ns
    clock.ns += 50 * MS
    settle(symbolizer, now_ns=clock)
    at = {
        after_ms: frame(symbolizer, TEXT + 0x14, seen_ns + after_ms * MS)
        for after_ms in (-1, 1, 10, 24)
    }
    assert at[-1].function == "old_a"
    for after_ms in (1, 10, 24):
        assert at[after_ms].unresolved is Unresolved.MODULE_GONE, after_ms
    assert frame(symbolizer, TEXT + 0x14, told_ns + MS).module.name == "fresh"


@pytest.mark.system
@pytest.mark.parametrize("missing", ["names", "sections"])
def test_failed_module_reads_are_retried_once_a_minute(host, symbolizer, clock, missing):
    clock.ns += 20 * MS
    host.load("fresh", TEXT + 0x4000, announce=False)
    hidden = host.root / ("proc/kallsyms" if missing == "names" else "sys/module/fresh")
    hidden.rename(host.root / "hidden")
    host.events.announce("add", "fresh")
    tried = []
    for steps, seconds in ((30, 1), (25, 5)):
        before = host.kallsyms_opened
        for _ in range(steps):
            clock.ns += seconds * 1000 * MS
            host.finish_scan()
            settle(symbolizer, now_ns=clock)
        tried.append(host.kallsyms_opened - before)
    if missing == "names":
        assert tried[0] >= MAX_ATTEMPTS
        assert tried[1] in (2, 3)
    (host.root / "hidden").rename(hidden)
    if missing == "names":
        host.write()
    clock.ns += 60_000 * MS

    def is_known():
        """Wakes the watch now, and returns whether the module's name and ranges are known."""
        host.events.wake()
        symbolizer.advance(clock.ns)
        result = frame(symbolizer, TEXT + 0x4014, clock.ns)
        source = result.module.range_source if result.module else None
        return result.function == "fresh_a" and source is RangeSource.SECTIONS

    wait_until(is_known)


@pytest.mark.parametrize("seed", range(2))
def test_no_incorrect_name_is_returned_whenever_uevents_arrive(host, symbolizer, clock, seed):
    """Freed addresses are reused immediately. Datagrams are received up to 40 ms late."""
    random_, places = random.Random(seed), {"old": 0}
    owners = [(0, 0, "old")]  # (time, address, owner since that time)
    right = unresolved = 0
    for datagram, event in read_captured():
        if event is None:
            continue
        clock.ns += random_.randrange(1, 30) * MS
        if event.action is ModuleAction.ADDED:
            place = next(n for n in range(1000) if n not in places.values())
            places[event.name] = place
            host.load(event.name, TEXT + 0x4000 * place, prefix=f"{len(owners)}_", announce=False)
            owners.append((clock.ns, place, f"{len(owners)}_{event.name}"))
        else:
            place = places.pop(event.name, None)
            if place is None:
                continue  # the module was loaded before the capture
            host.unload(event.name, announce=False)
            owners.append((clock.ns, place, None))
        host.events.queue.append(datagram)
        clock.ns += MS  # the event occurred within this millisecond
        if random_.random() < 0.6:
            continue
        clock.ns += random_.randrange(40) * MS
        host.events.wake()
        settle(symbolizer, now_ns=clock)
        for _ in range(100):
            time_ns = clock.ns - random_.randrange(200) * MS - MS // 2
            place = random_.choice(owners[-10:])[1]
            changes = [(since_ns, owner) for since_ns, where, owner in owners if where == place]
            then = [owner for since_ns, owner in changes if since_ns <= time_ns]
            if any(since_ns <= time_ns <= since_ns + MS for since_ns, _ in changes):
                continue
            if not then or then[-1] is None:
                continue  # no code to sample
            result = frame(symbolizer, TEXT + 0x4000 * place + 0x14, time_ns)
            assert result.module is None or then[-1].endswith(result.module.name)
            assert result.function in ("", f"{then[-1]}_a")
            right += bool(result.function)
            unresolved += not result.function
    print(f"{right} named, {unresolved} in loaded modules without a name")  # noqa: T201
    assert right > unresolved
