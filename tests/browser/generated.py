"""Generated profiles of a busy host: deep stacks with shared callers, spread over time and CPUs."""

import random
from array import array

from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Stack,
    WindowSample,
)
from tests.windows import make_window

START_NS = 1_700_000_000 * 10**9
_WORDS = ["read", "write", "page", "alloc", "free", "lock", "hash", "send", "recv", "parse", "copy"]
_LIBRARIES = ["libc.so.6", "libssl.so.3", "libstdc++.so.6", "server", "libz.so.1"]


def _modules(kind, names):
    return [Module(name, kind, None, FileId(f"{at:032x}"), 0) for at, name in enumerate(names)]


def _functions(rng, side, modules, count):
    names = [f"{rng.choice(_WORDS)}_{rng.choice(_WORDS)}_{number}" for number in range(count)]
    if side.has_files:
        lines = [Line(f"View.{name}", "", f"/srv/app/{name[:4]}.py", 9) for name in names]
        return [Frame(None, n, (line,), 0, side) for n, line in enumerate(lines)]
    return [Frame(modules[n % len(modules)], n, (Line(name),), 0, side)
            for n, name in enumerate(names)]  # fmt: skip


def busy_host(samples, *, stacks, seconds=60, cpus=8, seed=1):
    """Returns a window with the given numbers of samples and stacks (of 20 to 40 frames each)."""
    rng = random.Random(seed)
    kernel = _functions(rng, KERNEL_SIDE, [*_modules(ModuleKind.VMLINUX, ["vmlinux"]) * 3,
                        *_modules(ModuleKind.LOADED, ["ext4"])], 3000)  # fmt: skip
    user = _functions(rng, USER_SIDE, _modules(ModuleKind.USER, _LIBRARIES), 4000)
    python = _functions(rng, PYTHON_SIDE, [], 300)
    processes = [f"worker-{n}" if n % 3 else f"python{n}" for n in range(12)]

    def walk(pool, at, length):
        results = []
        for _ in range(length):
            choice = min(int(rng.expovariate(1.7)), 6)
            at = (at * 31 + choice * 977 + 7) % len(pool)
            results.append(pool[at])
        return results

    groups = [[] for _ in processes]
    weights = [1 / (1 + n) ** 0.6 for n in range(stacks)]
    scale = samples / sum(weights)
    left = samples
    for number, weight in enumerate(weights):
        count = left if number == stacks - 1 else min(left, max(1, round(weight * scale)))
        left -= count
        owner = min(int(rng.expovariate(0.5)), len(processes) - 1)
        outer = walk(python if processes[owner][0] == "p" else user, owner, rng.randint(6, 12))
        inner = walk(user, owner * 7, rng.randint(7, 14))
        below = walk(kernel, owner % 4, rng.randint(7, 14)) if number % 5 < 3 else []
        stack = Stack.from_frames((*below[::-1], *inner[::-1], *outer[::-1]))
        center, spread = rng.random() * seconds, seconds * rng.choice((0.03, 0.3, 1))
        shares = min(count, cpus)
        for share in range(shares):
            times = array("Q", (
                START_NS + int(1e9 * ((center + spread * rng.random()) % (seconds - 0.001)))
                for _ in range(count // shares + (share < count % shares))
            ))  # fmt: skip
            tid = 100 * owner + share
            groups[owner].append(
                WindowSample(stack, tid, f"thread-{share}", (owner + share) % cpus, None, times)
            )
    host = {"host.name": "web-1", "os.version": "6.12.117"}
    named = (
        ({**host, "process.pid": 100 + n, "process.executable.name": name}, groups[n])
        for n, name in enumerate(processes)
    )
    end_ns = START_NS + int(seconds * 1e9)
    return make_window(START_NS, end_ns, *named, period_ns=10_101_010, taken=samples)
