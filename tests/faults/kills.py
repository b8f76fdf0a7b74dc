"""Kills agents at random instants and accounts for their samples from the received data alone.

Run ``python tests/faults/kills.py [KILLS] [SEED]`` as root. Agents that share a spool run one after
the other and are killed at random instants, while the receiver accepts, rejects, hangs, or loses
responses at random. Finally, another agent delivers the rest of the spool. The script exits with 1
unless the number of samples taken, according to the last request, equals the number that arrived
(by ``profile_id``) plus the number reported as lost. Half of the killed agents use
``fsync: always``, and half use ``fsync: never``.
"""

# ruff: noqa: T201, E402 - a command prints for its user

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from otel_kprofiler.export import ExportQueue, Spool
from otel_kprofiler.export.queue import QueueCounts
from otel_kprofiler.model import Batch
from otel_kprofiler.sdk import InMemoryProfileExporter
from tests.agents import Agent
from tests.faults.table.kinds.receivers import FINAL, GOOD, LOSING, TRANSIENT, at_random
from tests.faults.table.payloads import EARLIER, STREAM, Received
from tests.faults.table.receivers import HttpReceiver, Request

LONGEST_S = 2.5
LAST_RUN_S = 5.0
SHARE_OF_RUNS = 0.8
"""Fraction of agents killed after the first sample; other agents may be killed during start-up."""

CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 299, self_profiled: mark, send_idle_frames: true,
    reporter_interval: 200ms}}
exporters:
  otlp_http:
    endpoint: http://127.0.0.1:{port}
    timeout: 500ms
    retry_on_failure: {{initial_interval: 50ms, max_interval: 200ms, max_elapsed_time: 1s}}
    max_message_bytes: 16384
    sending_queue: {{storage: "{spool}", fsync: {fsync}, max_megabytes: 64}}
service:
  shutdown_timeout: 30s
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_http]}}}}
"""


def unless_stored(refuse):
    """Returns a handler that accepts stored batches, and calls ``refuse`` for new batches."""

    def answer(request):
        is_stored = request.body in request.receiver.payloads
        (Request.accept if is_stored else refuse)(request)

    return answer


ANSWERS = (*GOOD, *TRANSIENT, *map(unless_stored, FINAL), *LOSING)


def check_unknown(received: Received) -> list[str]:
    """Lists streams whose ``unknown_since_unix_ns`` precedes the previous stream's last sample."""
    wrong = []
    for before, after in itertools.pairwise(received.streams("on_cpu")):
        since = received.accounts["on_cpu", after].get(f"{STREAM}unknown_since_unix_ns", 0)
        if since < received.last_ns[before]:
            wrong.append(f"{after}: unknown since {since}, before {received.last_ns[before]}")
    return wrong


def kill(agent: Agent) -> None:
    """Kills an agent, which may still be starting, but must not have exited on its own."""
    assert agent.process.poll() is None, agent.log
    agent.kill()


class Result(NamedTuple):
    """The outcome of a series of kills.

    Attributes:
        lost: the losses that the last stream reports.
        difference: samples taken minus samples that arrived or were reported as lost.
        wrong: streams whose ``unknown_since_unix_ns`` is too late.
    """

    received: Received
    lost: dict[str, int]
    difference: int
    wrong: list[str]


def run_kills(directory: Path, kills: int, fsync: str, seed: int) -> Result:
    chance = random.Random(seed)
    receiver = HttpReceiver(at_random(*ANSWERS, seed=seed))
    text = CONFIG.format(port=receiver.address[1], spool=directory / "spool", fsync=fsync)
    for _ in range(kills):
        agent = Agent(directory, text)
        if chance.random() < SHARE_OF_RUNS:
            agent.wait_until_it_samples()
        time.sleep(chance.uniform(0, LONGEST_S))
        kill(agent)
    receiver.heal()
    agent = Agent(directory, text)
    agent.wait_until_it_samples()
    time.sleep(LAST_RUN_S)
    account = agent.stop()["kinds"]["on_cpu"]
    receiver.close()
    assert account["gaps"] == []
    assert account["exporters"]["otlp_http"]["pending"] == 0, account
    received = Received(receiver.payloads)
    *earlier, last = received.streams("on_cpu")
    totals = received.accounts["on_cpu", last]
    # The last stream reports the samples and losses from all earlier streams in the spool.
    assert not earlier or f"{EARLIER}samples" in totals
    lost = {name: count for name, count in totals.items() if ".lost." in name}
    return Result(received, lost, received.missing("on_cpu"), check_unknown(received))


def deliver(spool: Path) -> tuple[tuple[Batch, ...], QueueCounts, int]:
    """Returns a spool's batches and counts, and the time after which losses are unknown."""
    exporter = InMemoryProfileExporter()
    queue = ExportQueue(exporter, spool=Spool(str(spool), fsync=False))
    assert queue.force_flush(60_000)
    counts, since = queue.counts(), queue.unknown_since_unix_ns
    queue.shutdown()
    return exporter.get_finished_batches(), counts, since


def run_truncations(directory: Path, cuts: int, seed: int) -> list[str]:
    """Randomly truncates a killed agent's spool, as a power failure would; returns any problems.

    Samples missing from any segment but the last must be counted. Samples missing from the last
    segment must be later than ``unknown_since_unix_ns``, or be counted.
    """
    chance = random.Random(seed)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # reserves a port on which nobody listens
        port = nobody.getsockname()[1]
        text = CONFIG.format(port=port, spool=directory / "spool", fsync="never")
        for _ in range(3):
            agent = Agent(directory, text)
            agent.wait_until_it_samples()
            time.sleep(LONGEST_S)
            kill(agent)
    (spool,) = (directory / "spool").iterdir()
    whole, _, _ = deliver(Path(shutil.copytree(spool, directory / "whole")))
    segments = sorted(path.name for path in spool.glob("*.spool"))
    wrong = []
    for number in range(cuts):
        copy = Path(shutil.copytree(spool, directory / f"cut{number}"))
        name = chance.choice(segments)
        at = chance.randrange((copy / name).stat().st_size)
        os.truncate(copy / name, at)
        arrived, counts, since = deliver(copy)
        there = {batch.payload for batch in arrived}
        missing = [batch for batch in whole if batch.payload not in there]
        if name == segments[-1]:
            missing = [batch for batch in missing if batch.end_unix_ns <= max(since, 1)]
        samples = sum(batch.sample_count for batch in missing)
        lost = sum(counts.lost.values())
        if lost != samples or not since or len(arrived) + len(missing) == 0:
            wrong.append(f"{name} cut at {at}: {samples} samples missing, {lost} counted as lost")
        shutil.rmtree(copy)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument("seed", nargs="?", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    is_exact = True
    for at, fsync in enumerate(("always", "never")):
        with tempfile.TemporaryDirectory() as directory:
            kills = (options.kills + 1 - at) // 2
            result = run_kills(Path(directory), kills, fsync, options.seed + at)
        received = result.received
        print(f"fsync {fsync}, seed {options.seed + at}: {kills} kills, {len(received.accounts)} "
              f"streams, {received.sum('on_cpu')} samples arrived, {received.twice} of them twice, "
              f"lost {result.lost}, difference {result.difference}, {result.wrong}",
              flush=True)  # fmt: skip
        is_exact = is_exact and not result.difference and not result.wrong
    with tempfile.TemporaryDirectory() as directory:
        wrong = run_truncations(Path(directory), options.kills, options.seed)
    print(f"{options.kills} spools truncated, seed {options.seed}: problems {wrong}")
    return 0 if is_exact and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
