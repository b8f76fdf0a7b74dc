"""Collects the agent's own metrics with opentelemetry-sdk, and sends them to OTLP receivers.

Names follow the semantic conventions: ``process.*`` and ``otel.sdk.*``. The conventions do not
cover profiles yet, so processor and exporter metrics are named like those for spans. Metrics
without a counterpart in the conventions are named ``kprofiler.*``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.resources import Resource

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.export import (
    METRICS,
    ClientSettings,
    ExportResult,
    OtlpSender,
    Verdict,
    advise_plain_text,
    open_client,
)
from otel_kprofiler.model import Account, ExporterAccount, LossCause, Losses
from otel_kprofiler.otlp import encode_metrics
from otel_kprofiler.version import __version__

if TYPE_CHECKING:
    from otel_kprofiler.agent.telemetry import Readings

_BY_EXPORTER: Final = (LossCause.REJECTED, LossCause.RETRIES_EXHAUSTED, LossCause.WRITE_FAILED)
_KIND: Final = "kprofiler.sample.kind"
_COARSE: Final = "kprofiler.coarse"
_DURATIONS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_ADVICE: Final = (
    "; add a metrics pipeline to the receiver, or set service.telemetry.metrics.level: none"
)

_log = logging.getLogger(__name__)


class SelfMetrics:
    """Sends the agent's metrics to OTLP receivers.

    All receivers get the same cumulative values, which start when this object is created and
    continue after :meth:`configure`. :meth:`record_export` is thread-safe; other methods are not.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._instance_id = str(uuid.uuid4())
        self._senders: list[_Sender] = []
        with _no_environment():
            self._reader = InMemoryMetricReader()
            provider = MeterProvider([self._reader], Resource({}), shutdown_on_exit=False)
        meter = provider.get_meter("otel_kprofiler", __version__)
        self._durations = meter.create_histogram(
            "otel.sdk.exporter.operation.duration",
            "s",
            "Duration of exporting one batch, including retries.",
            explicit_bucket_boundaries_advisory=_DURATIONS_S,
        )
        counter, gauge = meter.create_observable_counter, meter.create_observable_up_down_counter
        for create, name, unit, observe, text in (
            (gauge, "otel.sdk.processor.profile_sample.queue.size", "{sample}", self._queued,
             "Samples waiting for export or being exported."),
            (counter, "otel.sdk.processor.profile_sample.processed", "{sample}", self._processed,
             "Samples that have left the queue; error.type has the cause of drops."),
            (counter, "otel.sdk.exporter.profile_sample.exported", "{sample}", self._exported,
             "Samples whose export has finished; error.type has the cause of failures."),
            (counter, "kprofiler.sample.taken", "{sample}", self._taken,
             "Samples taken by the BPF program."),
            (counter, "kprofiler.sample.lost", "{sample}", self._lost,
             "Samples lost between kernel and user space, by error.type."),
            (counter, "kprofiler.sample.missed", "{sample}", self._missed,
             "Samples that the kernel missed on busy CPUs."),
            (counter, "kprofiler.sample.coarse", "{sample}", self._coarse_samples,
             "Samples with less detail, from processes above their budget, by kprofiler.coarse."),
            (counter, "kprofiler.symbol.record.lost", "{record}", self._lost_records,
             "Lost code load and unload records, by error.type."),
            (counter, "kprofiler.symbol.reload", "{reload}",
             lambda _: [Observation(readings.generation())], "Kernel symbol changes."),
            (counter, "process.cpu.time", "s", self._process_time, "CPU time of the agent."),
            (counter, "kprofiler.cpu.time", "s", self._other_time,
             "CPU time of the agent outside its process, by kprofiler.cpu.part."),
            (gauge, "process.memory.usage", "By", _memory, "Resident memory of the agent."),
        ):  # fmt: skip
            create(name, [observe], unit, text)

    def record_export(self, name: str, result: ExportResult, seconds: float) -> None:
        """Record the duration and the outcome of one export."""
        error = {"error.type": result.error_type} if result.error_type else {}
        self._durations.record(seconds, {**_exporter(name), **error})

    def configure(
        self,
        receivers: Mapping[str, ClientSettings],
        attributes: Mapping[str, Any],
        *,
        interval_s: float,
    ) -> None:
        """Send metrics to these receivers only, every ``interval_s`` seconds.

        ``attributes`` are added to the Resource attributes that identify the agent. Other receivers
        are sent the final values in the background. Raises ``ExportError``, and changes nothing, if
        a TLS file is unusable.
        """
        clients = {name: _open_client(name, settings) for name, settings in receivers.items()}
        for sender in self._senders:
            sender.end()
        resource = _resource(self._instance_id, attributes)
        collect = functools.partial(self._collect, resource)
        self._senders = [
            _Sender(name, client, collect, interval_s, receivers[name].timeout_s)
            for name, client in clients.items()
        ]

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the final values, giving up after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))

    def _collect(self, resource: Resource) -> bytes:
        data = self._reader.get_metrics_data()
        groups = data.resource_metrics if data else ()
        return encode_metrics(
            MetricsData([dataclasses.replace(group, resource=resource) for group in groups])
        )

    def _queued(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._exporters():
            yield Observation(account.pending, {**_processor(account.name), **kind})

    def _processed(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._exporters():
            attributes = {**_processor(account.name), **kind}
            finished = account.exported + sum(account.lost.get(cause, 0) for cause in _BY_EXPORTER)
            yield Observation(finished, attributes)
            yield from _losses(account.lost, attributes, set(LossCause) - set(_BY_EXPORTER))

    def _exported(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._exporters():
            attributes = {**_exporter(account.name), **kind}
            yield Observation(account.exported, attributes)
            yield from _losses(account.lost, attributes, _BY_EXPORTER)

    def _exporters(self) -> Iterator[tuple[ExporterAccount, dict[str, str]]]:
        for account, kind in self._kinds():
            for exporter in account.exporters:
                yield exporter, kind

    def _kinds(self) -> Iterator[tuple[Account, dict[str, str]]]:
        for kind, account in self._readings.account().kinds.items():
            yield account, {_KIND: kind}

    def _taken(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._kinds():
            yield Observation(account.taken, kind)

    def _missed(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._kinds():
            yield Observation(account.missed, kind)

    def _coarse_samples(self, _: CallbackOptions) -> Iterator[Observation]:
        for detail, count in self._readings.coarse().items():
            yield Observation(count, {_COARSE: detail})

    def _lost_records(self, _: CallbackOptions) -> Iterator[Observation]:
        for cause, count in self._readings.lost_symbols().items():
            yield Observation(count, {"error.type": cause})

    def _process_time(self, _: CallbackOptions) -> Iterator[Observation]:
        times = self._readings.cpu_time()
        yield Observation(times.user, {"cpu.mode": "user"})
        yield Observation(times.system, {"cpu.mode": "system"})

    def _other_time(self, _: CallbackOptions) -> Iterator[Observation]:
        times = self._readings.cpu_time()
        yield Observation(times.children, {"kprofiler.cpu.part": "children"})
        yield Observation(times.programs, {"kprofiler.cpu.part": "programs"})

    def _lost(self, _: CallbackOptions) -> Iterator[Observation]:
        for account, kind in self._kinds():
            yield from _losses(account.lost, kind, LossCause)


def _losses(
    lost: Losses, attributes: Mapping[str, str], causes: Iterable[LossCause]
) -> Iterator[Observation]:
    for cause in causes:
        if lost.get(cause):
            yield Observation(lost[cause], {**attributes, "error.type": cause.value})


def _processor(name: str) -> dict[str, str]:
    return {
        "otel.component.type": "batching_profile_processor",
        "otel.component.name": f"batching_profile_processor/{name}",
    }


def _exporter(name: str) -> dict[str, str]:
    kind = name.partition("/")[0]
    return {"otel.component.type": f"{kind}_profile_exporter", "otel.component.name": name}


def _memory(_: CallbackOptions) -> Iterator[Observation]:
    yield Observation(read_resident_bytes())


def _resource(instance_id: str, attributes: Mapping[str, Any]) -> Resource:
    return Resource(
        {
            "service.name": "otel-kprofiler",
            "service.version": __version__,
            "service.instance.id": instance_id,
            "host.name": platform.node(),
            "process.pid": os.getpid(),
            **attributes,
        }
    )


def _open_client(name: str, settings: ClientSettings) -> OtlpSender:
    return open_client(
        dataclasses.replace(
            settings,
            protocol="grpc" if settings.protocol == "grpc" else "http/protobuf",
            exact=False,
            proxy_url=settings.proxy_url or "",
            development_version="",
        ),
        name,
        signal=METRICS,
    )


class _Sender:
    """Sends metrics to one receiver, without retries, because later values replace lost values."""

    def __init__(
        self,
        name: str,
        client: OtlpSender,
        collect: Callable[[], bytes],
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._client = client
        self._collect = collect
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"kprofiler-metrics {name}", daemon=True
        )
        # warnings already logged, by whether the receiver lacks a metrics pipeline
        self._warned: set[bool] = set()
        self._thread.start()

    def end(self) -> None:
        """Send the final values in the background, then close the client."""
        self._ends.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the final values have been sent, or until the timeout."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ends.wait(self._interval_s):
            self._send()
        self._send()
        self._client.shutdown(0)

    def _send(self) -> None:
        try:
            request = self._collect()
        except Exception:  # noqa: BLE001 - logged; the next values may be readable
            _log.exception("%s: the agent's own metrics cannot be collected", self._name)
            return
        answer = self._client.send_once(request, self._timeout_s)
        if answer.verdict is Verdict.ACCEPTED:
            self._warned.clear()
            return
        no_pipeline = answer.is_unimplemented
        if no_pipeline not in self._warned:
            self._warned.add(no_pipeline)
            advice = _ADVICE if no_pipeline else ""
            text = advise_plain_text(answer.message)
            _log.warning(
                "%s: the agent's own metrics are not delivered: %s (%s)%s (logged once)",
                self._name, text, answer.status, advice, extra={"subject": f"{self._name}{advice}"},
            )  # fmt: skip


@contextmanager
def _no_environment() -> Iterator[None]:
    """Hide OTEL_* variables from the SDK, so that only the configuration file applies."""
    hidden = {name: os.environ.pop(name) for name in tuple(os.environ) if name.startswith("OTEL_")}
    try:
        yield
    finally:
        os.environ.update(hidden)
