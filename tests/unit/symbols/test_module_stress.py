"""Names are never wrong, even while modules are loaded and unloaded."""

import os
import random
import threading
import time

import pytest
from module_host import INIT, TEXT, Host, boot_ns, settle

from otel_kprofiler.symbols import KernelSymbolizer
from otel_kprofiler.tracking import ModuleWatch

SECONDS = float(os.environ.get("KPROFILER_STRESS_S", "1.5"))
PLACES = 6
RESOLVERS = 2


@pytest.mark.system
def test_lookups_during_loads_and_unloads_are_correct(tmp_path):
    """Modules with alternating names share addresses. Lookups agree with the loader's log."""
    host = Host(tmp_path)
    watch = ModuleWatch(host.files, lambda: host.events)
    symbolizer = KernelSymbolizer.live(host.files, modules=watch)
    lives = [[] for _ in range(PLACES)]  # (since, until, name) of each load
    stop = threading.Event()
    problems, counts = [], [0] * RESOLVERS

    def resolve(number):
        chance = random.Random(number)
        while not stop.is_set():
            place = chance.randrange(PLACES)
            known = lives[place][-1:]
            frames = symbolizer.resolve_addresses(
                [TEXT + 0x4000 * place + 0x14], time_ns=boot_ns() - chance.randrange(10**9)
            )
            counts[number] += 1
            name = frames[0].module.name if frames[0].module else ""
            if name and not name.startswith(f"place{place}_"):
                problems.append((place, name, known))

    threads = [threading.Thread(target=resolve, args=(number,)) for number in range(RESOLVERS)]
    for thread in threads:
        thread.start()
    end, cycle = time.monotonic() + SECONDS, 0
    try:
        while time.monotonic() < end or not cycle or not min(counts):
            place = cycle % PLACES
            name = f"place{place}_{cycle}"
            base = TEXT + 0x4000 * place
            host.load(name, base, build_id=cycle % 250, init=INIT + 0x1000 * place)
            settle(symbolizer, 30)
            since_ns = boot_ns()
            time.sleep(0.002)
            (frame,) = symbolizer.resolve_addresses([base + 0x14], time_ns=boot_ns())
            assert frame.module.name == name
            assert frame.function in ("", f"{name}_a")
            until_ns = boot_ns()
            settle(symbolizer, 30)
            host.unload(name)
            lives[place].append((since_ns, until_ns, name))
            settle(symbolizer, 30)
            for since_ns, until_ns, name in lives[place][-2:]:
                (frame,) = symbolizer.resolve_addresses(
                    [base + 0x14], time_ns=(since_ns + until_ns) // 2
                )
                assert frame.module.name == name
            cycle += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        symbolizer.close()
    assert not problems
    assert min(counts) > 0
    assert watch.counts.restarts == 0
    assert len(symbolizer.snapshot.modules) <= 2
