"""Runs the agent under load, with a fault each minute, and checks its memory and sample counts.

``make soak MINUTES=30`` runs this module, which pytest does not collect. Two agents run at the same
time: one sends to a receiver in this script, the other to a real Collector if it has been built
(see ``tests/collector``). Prints memory, CPU, descriptors, threads and sample counts once a minute,
and exits with status 1 if a sample is unaccounted for or an agent's resource usage has grown.
"""

# ruff: noqa: T201 - a command prints for its user

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.usage import cpu_seconds
from otel_kprofiler.agent.memory import read_resident_bytes
from tests.faults import conftest as faults
from tests.faults.accounts import Arrived

GROWTH_MB = 8
DESCRIPTORS = 4


def usage(pid: int) -> dict[str, float]:
    return {
        "rss_mb": read_resident_bytes(pid) / 2**20,
        "cpu_s": cpu_seconds(pid),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


@dataclass
class Soak:
    """The agents by name, and the receiver for agent ``fake``, in which faults are injected."""

    receiver: faults.Receiver
    start: Callable[[str], faults.Agent]
    agents: dict[str, faults.Agent] = field(default_factory=dict)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.agents["fake"].process


def down(soak: Soak) -> Iterator[None]:
    soak.receiver.down()
    yield
    soak.receiver.up()


def refusing(soak: Soak) -> Iterator[None]:
    import grpc

    before = soak.receiver.answer
    soak.receiver.answer = lambda _, context: context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
    yield
    soak.receiver.answer = before


def slow(soak: Soak) -> Iterator[None]:
    before = soak.receiver.answer

    def answer(_request: bytes, context: object) -> bytes:
        time.sleep(3)
        return b"" if context.is_active() else context.abort(1, "")  # type: ignore[attr-defined]

    soak.receiver.answer = answer
    yield
    soak.receiver.answer = before


def stopped(soak: Soak) -> Iterator[None]:
    """Stops the agent with SIGSTOP, as if the host were overloaded."""
    soak.process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    soak.process.send_signal(signal.SIGCONT)
    yield


def killed(soak: Soak) -> Iterator[None]:
    soak.receiver.down()
    time.sleep(10)
    soak.agents["fake"].kill()
    soak.agents["fake"] = soak.start("fake")
    soak.receiver.up()
    yield


def many_processes(_soak: Soak) -> Iterator[None]:
    code = "import os\nfor _ in range(8000):\n pid = os.fork()\n pid or os._exit(0)\n os.wait()"
    subprocess.run([sys.executable, "-c", code], check=True)
    yield


def reloaded(soak: Soak) -> Iterator[None]:
    soak.agents["fake"].reload()
    yield


FAULTS: list[Callable[[Soak], Iterator[None]]] = [
    down, refusing, killed, stopped, slow, many_processes, reloaded,
]  # fmt: skip


def unaccounted(account: dict, arrived: Arrived, kills: int) -> list[str]:
    exporter = account["exporters"]["otlp_grpc"]
    problems = list(account["gaps"])
    if exporter["exported"] + sum(exporter["lost"].values()) + exporter["pending"] != (
        account["received"] + exporter["carried"]
    ):
        problems.append("received samples are missing in the exporter's account")
    # Checks each stream's last counts, which a killed agent left in the last spooled window.
    for stream, totals in arrived.totals.items():
        ring = sum(n for cause, n in totals.lost.items() if cause.value == "ring_full")
        late = sum(totals.lost.values()) - ring
        got = arrived.samples[stream] - arrived.twice_in[stream]
        print(f"stream {stream}: {totals}, {got} arrived once, {arrived.twice_in[stream]} again")
        # A killed agent may have taken samples that it did not write to a window; its statistics
        # mark this period as unknown.
        open_end = totals.taken - ring - totals.samples
        was_killed = stream != list(arrived.totals)[-1]
        if got + late != totals.samples or open_end < 0 or (open_end and not was_killed):
            problems.append(f"stream {stream} does not add up")
    unknown = [totals.unknown_since_unix_ns for totals in arrived.totals.values()]
    if len(unknown) != kills + 1 or unknown.count(0) != 1:
        problems.append(f"{kills} kills, and the streams report unknown times since {unknown}")
    return problems


def account_of(agent: faults.Agent) -> dict:
    agent.wait_until(lambda: agent.get("/status")[0] == 200)
    return agent.get("/status")[1]["account"]["exporters"]["otlp_grpc"]


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Starts a real Collector, and yields its gRPC endpoint."""
    from tests.collector.conftest import VERSIONS, Collector

    with (
        tempfile.TemporaryDirectory() as directory,
        Collector(VERSIONS[0], Path(directory)) as running,
    ):
        yield running.grpc_endpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--rate", type=int, default=99)
    parser.add_argument("--no-collector", action="store_true")
    options = parser.parse_args()
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        receiver = faults.Receiver()
        receiver.up()
        stack.callback(receiver.down)
        endpoints = {"fake": receiver.endpoint}
        if not options.no_collector:
            endpoints["real"] = stack.enter_context(collector())

        def start(name: str) -> faults.Agent:
            (directory / name).mkdir(exist_ok=True)
            queue = f"{{storage: '{directory}/{name}/spool'}}"
            return faults.Agent(directory / name, endpoints[name], queue=queue, rate=options.rate)

        soak = Soak(receiver, start)
        agents = soak.agents
        agents.update((name, start(name)) for name in endpoints)
        seconds = str(int(options.minutes * 60) + 60)
        load = subprocess.Popen([sys.executable, "-m", "benchmarks.mixed_load", seconds])
        stack.callback(load.kill)
        time.sleep(15)
        used = {name: [usage(agent.process.pid)] for name, agent in agents.items()}
        end, number, kills = time.monotonic() + options.minutes * 60, 0, 0
        while time.monotonic() < end:
            fault = FAULTS[number % len(FAULTS)]
            number += 1
            kills += fault is killed
            under_way = fault(soak)
            next(under_way)
            time.sleep(20)
            next(under_way, None)
            time.sleep(max(0.0, min(40.0, end - time.monotonic())))
            for name, agent in agents.items():
                used[name].append(usage(agent.process.pid))
                now = {key: round(value, 1) for key, value in used[name][-1].items()}
                exporter = account_of(agent)
                print(f"{number:3} {fault.__name__:15} {name}: {now} {exporter}", flush=True)
        for name, agent in agents.items():
            # Wait until data delayed by a fault is delivered, so that all data can be compared.
            agent.wait_until(lambda agent=agent: not agent.get("/status")[1]["unreachable"], 90)
            # Caches fill during the first third; after that, no value may grow.
            first, warm, last = used[name][0], used[name][len(used[name]) // 3], used[name][-1]
            share = (last["cpu_s"] - first["cpu_s"]) / (options.minutes * 60)
            if last["rss_mb"] > warm["rss_mb"] + GROWTH_MB:
                problems.append(f"{name}: memory grew from {warm} to {last}")
            if last["descriptors"] > warm["descriptors"] + DESCRIPTORS:
                problems.append(f"{name}: descriptors grew from {warm} to {last}")
            account = agent.stop()
            print(f"{name}: first {first}\n      last {last}, {share:.1%} of a core")
            print(json.dumps(account))
            problems += account["gaps"]
            if name == "fake":
                problems += unaccounted(account, Arrived(receiver.payloads), kills)
    print("\n".join(problems) or "every sample is accounted for, and nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
