"""Compares the agent's cost by default, with ``stacks: kernel``, and at five times the rate.

All agents run at the same time under the same load, so that the ratios do not depend on the load.
"""

import contextlib
import gzip
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.bench_agent import LOAD_START_S, AgentRun, mixed_load
from benchmarks.receiver import Receiver
from benchmarks.rows import Row
from benchmarks.usage import cpu_seconds
from otel_kprofiler.agent.memory import read_resident_bytes

_KERNEL: Final = "stacks: kernel"
_AGENTS: Final[Mapping[str, Mapping[str, object]]] = {
    _KERNEL: {"stacks": "kernel", "user_symbols": "off"},
    "defaults": {},
    "defaults at 99 Hz": {"samples_per_second": 99},
}
_SETTLE_S: Final = 15.0
"""Time allowed for reading the symbols of running programs after the agents' first requests."""


def rows(quick: bool) -> Iterator[Row]:
    """Yields each agent's CPU time, the gzipped size of its requests, and its memory."""
    seconds = 15 if quick else 60
    with contextlib.ExitStack() as stack:
        stack.enter_context(mixed_load(seconds + LOAD_START_S + _SETTLE_S + 120))
        time.sleep(LOAD_START_S)
        receivers = {name: Receiver() for name in _AGENTS}
        runs = {}
        for name, settings in _AGENTS.items():
            stack.callback(receivers[name].close)
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            runs[name] = AgentRun(directory, receivers[name].endpoint, **settings)
            stack.callback(runs[name].process.kill)
        while not all(receiver.requests for receiver in receivers.values()):
            if any(run.process.poll() is not None for run in runs.values()):
                raise RuntimeError("an agent exited before its first request")
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        began = {name: cpu_seconds(run.process.pid) for name, run in runs.items()}
        sent = {name: len(receiver.requests) for name, receiver in receivers.items()}
        time.sleep(seconds)
        used = {
            name: (cpu_seconds(run.process.pid) - began[name]) / seconds
            for name, run in runs.items()
        }
        sizes = {
            name: sum(len(gzip.compress(payload, 6)) for _, payload in of.requests[sent[name] :])
            for name, of in receivers.items()
        }
        memory = {name: read_resident_bytes(run.process.pid) for name, run in runs.items()}
        for name, run in runs.items():
            account = run.stop()
            beside = {} if name == _KERNEL else {"beside": _KERNEL}
            yield Row(
                f"agent CPU, {name}", f"{used[name]:.2%} of a core",
                **beside, ratio=used[name] / used[_KERNEL],
            )  # fmt: skip
            yield Row(
                f"sent, {name}", f"{sizes[name] / seconds:.0f} bytes/s",
                **beside, ratio=sizes[name] / sizes[_KERNEL],
            )  # fmt: skip
            yield Row(f"agent RSS, {name}", f"{memory[name] / 2**20:.0f} MiB")
            yield Row(f"samples, {name}", f"{account['taken']}")
