"""``make fleet HOSTS=200``: measures a real Collector that receives the windows of many hosts.

Each host consists of the agent's queue and gRPC exporter, with the agent's window schedule, jitter
and retries. All hosts start at the same instant, which is the worst case. The Collector limits its
memory, merges requests, and forwards them to a receiver in this process, which counts samples. With
``--restart``, the Collector is stopped halfway and started again after the given number of seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import heapq
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from benchmarks.bench_otlp import HOST, mixed_load_window
from benchmarks.usage import cpu_seconds
from otel_kprofiler.config import Receiver
from otel_kprofiler.config.otlp import RetryOnFailure, SendingQueue
from otel_kprofiler.export import PROFILES, ExportQueue, OtlpGrpcExporter, Part
from otel_kprofiler.model import Attributes, Batch, Resource, Window
from otel_kprofiler.otlp import encode_window, read_profiles
from otel_kprofiler.pipeline import WindowSchedule, window_schedule
from tests.collector.conftest import GATE, VERSIONS, build, free_ports
from tests.windows import move_window

SECOND_NS: Final = 1_000_000_000
DAY_S: Final = 86_400
RECORDED_HZ: Final = 99
VARIANTS: Final = 8
"""The number of variants of the recorded window, so that hosts send different requests."""
MARKS: Final = ("<!-- by make fleet -->\n", "<!-- end -->\n")
COLLECTOR: Final = """
receivers:
  otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{port}"}}}}}}
processors:
  memory_limiter: {{check_interval: 1s, limit_mib: 1024}}
exporters:
  otlp:
    endpoint: {sink}
    tls: {{insecure: true}}
    sending_queue:
      queue_size: 100000
      sizer: items
      batch: {{flush_timeout: 1s, min_size: 5000}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    profiles: {{receivers: [otlp], processors: [memory_limiter], exporters: [otlp]}}
"""


def load_windows(path: Path | None, rate: int) -> list[Window]:
    """Returns the windows from a file or from the recorded load, downsampled to a rate."""
    if path:
        return [window for window in read_profiles(path) if window.sample_count]
    recorded = mixed_load_window(user=False)
    return [thin(recorded, rate / RECORDED_HZ, random.Random(seed)) for seed in range(VARIANTS)]


def thin(window: Window, share: float, chance: random.Random) -> Window:
    groups = []
    (profile,) = window.profiles
    for group in profile.resources:
        kept = [
            sample._replace(timestamps_unix_ns=times)
            for sample in group.samples
            if (times := [time for time in sample.timestamps_unix_ns if chance.random() < share])
        ]
        if kept:
            groups.append(group._replace(samples=kept))
    return replace(window, profiles=[replace(profile, resources=groups)])


def move(window: Window, end_unix_ns: int, host: Attributes) -> Window:
    moved = move_window(window, end_unix_ns - window.end_unix_ns)
    profiles = [
        replace(
            profile,
            resources=[
                group._replace(resource=Resource({**group.resource.attributes, **host}))
                for group in profile.resources
            ],
        )
        for profile in moved.profiles
    ]
    return replace(moved, profiles=profiles)


class TimedExporter(OtlpGrpcExporter):
    """An exporter that records when each batch was accepted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.arrivals: list[float] = []

    def export_parts(self, batch: Batch) -> Sequence[Part]:
        parts = super().export_parts(batch)
        if any(part.result.exported for part in parts):
            self.arrivals.append(time.monotonic())
        return parts


class Host:
    """One host: its schedule, queue and exporter, with the agent's defaults."""

    def __init__(
        self, number: int, windows: Sequence[Window], endpoint: str, schedule: WindowSchedule
    ) -> None:
        self._windows = windows
        self._schedule = schedule
        self._number = number
        self._attributes = {**HOST, "host.name": f"host-{number}", "host.id": f"{number:032x}"}
        self._chance = random.Random(number)
        self._exporter = TimedExporter(
            f"http://{endpoint}", retry=RetryOnFailure().settings(), timeout_s=5
        )
        self.arrivals = self._exporter.arrivals
        self.queue = ExportQueue(self._exporter, size=SendingQueue().settings().size)
        self.samples = self.requests = self.raw_bytes = 0
        self.first_payload = b""

    def next_s(self) -> float:
        length = self._schedule.length_ns(self._chance.random()) / SECOND_NS
        first = (self._schedule.first_ns or 0) / SECOND_NS
        return length if self.requests or not first else min(length, first)

    def send(self) -> None:
        window = self._windows[(self._number + self.requests) % len(self._windows)]
        moved = move(window, time.time_ns(), self._attributes)
        encoding = self._exporter.encoding._asdict()
        for batch in encode_window(moved, **encoding).batches:
            self.queue.put(batch)
            self.raw_bytes += len(batch.payload)
            self.first_payload = self.first_payload or batch.payload
        self.samples += moved.sample_count
        self.requests += 1


class Sink(grpc.GenericRpcHandler):
    """The receiver to which the Collector exports; counts requests, bytes and samples."""

    def __init__(self) -> None:
        self.samples = self.requests = self.bytes = 0
        self._lock = threading.Lock()
        self._method = grpc.unary_unary_rpc_method_handler(self._take)
        options = (("grpc.max_receive_message_length", -1),)
        self._server = grpc.server(ThreadPoolExecutor(1), options=options)
        self._server.add_generic_rpc_handlers((self,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> object:
        return self._method if handler_call_details.method == PROFILES.method else None

    def _take(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        message = ExportProfilesServiceRequest.FromString(request)
        samples = sum(
            len(sample.timestamps_unix_nano)
            for group in message.resource_profiles
            for scope in group.scope_profiles
            for profile in scope.profiles
            for sample in profile.samples
        )
        with self._lock:
            self.samples += samples
            self.requests += 1
            self.bytes += len(request)
        return b""

    def close(self) -> None:
        self._server.stop(0).wait()


class Gateway:
    """A Collector that can be restarted at the same address.

    Attributes:
        endpoint: ``host:port`` of the Collector's receiver.
        cpu_s: the CPU seconds of the Collector processes that have been stopped.
        peak_kib: the largest peak memory of any Collector process, in KiB.
    """

    def __init__(self, directory: Path, sink: str, version: str) -> None:
        (port,) = free_ports(1)
        self.endpoint = f"127.0.0.1:{port}"
        self._config = directory / "collector.yaml"
        self._config.write_text(COLLECTOR.format(port=port, sink=sink))
        self._program = build(version)
        self._log = directory / "collector.log"
        self.cpu_s, self.peak_kib = 0.0, 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "wb") as log:
            command = [str(self._program), "--config", str(self._config), GATE]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while b"Everything is ready" not in self._log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(self._log.read_text())
            time.sleep(0.02)

    def stop(self) -> None:
        """Stops the Collector, which first sends its pending data."""
        process, self._process = self._process, None
        if process is None:
            return
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        self.peak_kib = max(self.peak_kib, int(peak.split()[1]))
        self.cpu_s += cpu_seconds(process.pid)
        process.terminate()
        process.wait(60)


def busiest(times: Sequence[float], start: float, end: float) -> tuple[int, float]:
    """Returns the number of requests in an interval's busiest second, and the mean per second."""
    inside = Counter(int(time - start) for time in times if start <= time < end)
    return max(inside.values(), default=0), sum(inside.values()) / max(end - start, 1)


class Fleet:
    """All simulated hosts, driven by one thread."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        now = time.monotonic()
        self._due = [(now + host.next_s(), number) for number, host in enumerate(hosts)]
        heapq.heapify(self._due)
        self.times: list[float] = []  # times at which windows ended
        self.late_s = 0.0

    def run_until(self, end: float) -> None:
        """Closes windows as they become due, up to the time ``end``."""
        while self._due[0][0] < end:
            due, number = self._due[0]
            now = time.monotonic()
            if due > now:
                time.sleep(due - now)
            self.late_s = max(self.late_s, now - due)
            host = self.hosts[number]
            host.send()
            self.times.append(due)
            heapq.heapreplace(self._due, (due + host.next_s(), number))
        time.sleep(max(0.0, end - time.monotonic()))

    def counts(self) -> Counter[str]:
        results = Counter(taken=sum(host.samples for host in self.hosts))
        for host in self.hosts:
            counts = host.queue.counts()
            results += Counter(exported=counts.exported, queued=counts.queued)
            results += Counter({f"lost ({cause.value})": n for cause, n in counts.lost.items()})
        return results


def run(arguments: argparse.Namespace) -> Outcome:
    windows = load_windows(arguments.file, arguments.rate)
    schedule = window_schedule(Receiver())
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sink = Sink()
        stack.callback(sink.close)
        gateway = Gateway(directory, sink.endpoint, arguments.collector)
        gateway.start()
        stack.callback(gateway.stop)
        hosts = [
            Host(number, windows, gateway.endpoint, schedule) for number in range(arguments.hosts)
        ]
        fleet = Fleet(hosts)
        start = time.monotonic()
        end, returned = start + arguments.seconds, 0.0
        if arguments.restart:
            fleet.run_until(start + arguments.seconds / 2)
            gateway.stop()
            fleet.run_until(time.monotonic() + arguments.restart)
            gateway.start()
            returned = time.monotonic()
        fleet.run_until(end)
        deadline = time.monotonic() + 120
        while fleet.counts()["queued"] and time.monotonic() < deadline:
            time.sleep(0.1)
        counts = fleet.counts()
        for host in hosts:
            host.queue.shutdown()
        gateway.stop()
        took_s = time.monotonic() - start
        return Outcome(fleet, counts, gateway, sink, start, took_s, returned)


class Outcome(NamedTuple):
    """The outcome of a fleet run, with monotonic times in seconds."""

    fleet: Fleet
    counts: Counter[str]
    gateway: Gateway
    sink: Sink
    started: float
    took_s: float
    returned: float = 0.0
    """The time at which the Collector was ready again; 0 if it was not restarted."""


def describe(arguments: argparse.Namespace, outcome: Outcome) -> Iterator[tuple[str, str]]:
    fleet, counts, gateway, sink, start, took_s, returned = outcome
    hosts = fleet.hosts
    requests, raw = sum(h.requests for h in hosts), sum(h.raw_bytes for h in hosts)
    packed = sum(len(gzip.compress(h.first_payload, 6)) for h in hosts)
    packed *= raw / sum(len(h.first_payload) for h in hosts)  # assumes equal compression
    per_request_s = gateway.cpu_s / requests
    interval_s: float = window_schedule(Receiver()).interval_ns / SECOND_NS
    source = arguments.file.name if arguments.file else f"mixed load, {arguments.rate} Hz, 2 CPUs"
    restart = f", Collector down for {arguments.restart} s" if arguments.restart else ""
    yield "hosts", f"{len(hosts)} for {arguments.seconds} s ({source}{restart})"
    yield "Collector", f"v{arguments.collector}: memory_limiter, exporter batching"
    yield "samples taken", f"{counts['taken']:,}"
    for what, samples in counts.items():
        if what != "taken" and samples:
            yield f"… {what}", f"{samples:,}"
    yield "… forwarded by the Collector", f"{sink.samples:,}"
    yield "requests", f"{requests:,}, merged into {sink.requests:,}"
    per_day = DAY_S / interval_s / requests
    yield "data per host per day, gzip", f"{packed * per_day / 1e6:.1f} MB"
    yield "… before compression", f"{raw * per_day / 1e6:.1f} MB"
    yield "bytes per sample, gzip", f"{packed / counts['taken']:.0f}"
    yield "CPU time of the Collector per 1,000 requests", f"{per_request_s * 1000:.2f} s"
    yield "… in this run", f"{100 * gateway.cpu_s / took_s:.1f} % of a core"
    yield "hosts per core, with 5 s windows", f"{interval_s / per_request_s:,.0f}"
    yield "peak memory of the Collector", f"{gateway.peak_kib / 1024:.0f} MB"
    third = arguments.seconds / 3
    for what, since in (("first", 0.0), ("last", 2 * third)):
        most, mean = busiest(fleet.times, start + since, start + since + third)
        yield (f"requests per second in the {what} third of the run",
               f"at most {most}, mean {mean:.0f}")  # fmt: skip
    if returned:
        first = [min(time for time in host.arrivals if time > returned) for host in hosts]
        most, _ = busiest(first, returned, max(first) + 1)
        spread = f"within {max(first) - returned:.0f} s, at most {most} of {len(hosts)} hosts/s"
        yield "first request from each host after the Collector's restart", spread
    yield "maximum delay of the load generator", f"{fleet.late_s:.2f} s"


def write_table(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    before, begin, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{path} has no lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    table = "".join(f"| {what} | {value} |\n" for what, value in rows)
    path.write_text(f"{before}{begin}| What | Measured |\n|---|---|\n{table}{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="profiles to replay, from `record -o`")
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--rate", type=int, default=19, help="samples per second per CPU")
    parser.add_argument("--restart", type=int, default=0, help="seconds without Collector")
    parser.add_argument("--collector", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--write", type=Path, help="page to write the table to")
    arguments = parser.parse_args()
    logging.getLogger("otel_kprofiler").setLevel(logging.ERROR)  # hides warnings about the restart
    rows = []
    for what, value in describe(arguments, run(arguments)):
        rows.append((what, value))
        print(f"{what:45} {value}")
    if arguments.write:
        write_table(arguments.write, rows)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
