"""Creates the exporters that ``OTEL_PROFILES_EXPORTER`` selects for the embedded profiler."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Final, TextIO

from otel_kprofiler.errors import ConfigError, ConfigProblem, describe_error
from otel_kprofiler.export import (
    ClientSettings,
    ExportResult,
    FileExporter,
    ProfileExporter,
    open_client,
    read_settings,
)
from otel_kprofiler.forks import ProcessLock
from otel_kprofiler.model import Batch, Form, LossCause, Window
from otel_kprofiler.sdk.environment_variables import OTEL_KPROFILER_FILE, OTEL_PROFILES_EXPORTER

GROUP: Final = "opentelemetry_profiles_exporter"

ExporterFactory = Callable[[], ProfileExporter]


class InMemoryProfileExporter(ProfileExporter):
    """Keeps exported batches in memory, for tests. Thread-safe."""

    form = Form.PROTOBUF
    max_bytes = None
    name = "in_memory"

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._batches: list[Batch] = []
        self._stopped = False

    def export(self, batch: Batch) -> ExportResult:
        """Store the batch in memory."""
        with self._lock:
            if self._stopped:
                return ExportResult.failure(batch, LossCause.SHUTDOWN, "already shut down")
            self._batches.append(batch)
        return ExportResult.success(batch)

    def get_finished_batches(self) -> tuple[Batch, ...]:
        """Returns the batches exported so far."""
        with self._lock:
            return tuple(self._batches)

    def get_finished_windows(self) -> tuple[Window, ...]:
        """Returns the windows decoded from the batches exported so far."""
        from otel_kprofiler.otlp import decode_windows  # noqa: PLC0415 - protobuf

        return tuple(
            window
            for batch in self.get_finished_batches()
            for window in decode_windows(batch.payload)
        )

    def clear(self) -> None:
        """Drop the batches kept so far."""
        with self._lock:
            self._batches.clear()

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Reject new batches, but keep exported batches."""
        self._stopped = True


class ConsoleProfileExporter(ProfileExporter):
    """Prints each batch as one line of OTLP JSON.

    Args:
        out: the stream to print to; standard output by default.
        formatter: converts a batch in JSON form to the text that is printed.
    """

    form = Form.JSON
    max_bytes = None
    name = "console"

    def __init__(
        self,
        out: TextIO | None = None,
        formatter: Callable[[Batch], str] = lambda batch: batch.payload.decode() + os.linesep,
    ) -> None:
        self._out = out
        self._formatter = formatter
        self._stopped = False

    def export(self, batch: Batch) -> ExportResult:
        """Print the batch."""
        if self._stopped:
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "already shut down")
        out = self._out or sys.stdout
        try:
            out.write(self._formatter(batch))
            out.flush()
        except (OSError, ValueError) as error:
            return ExportResult.failure(batch, LossCause.WRITE_FAILED, describe_error(error))
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Reject new batches."""
        self._stopped = True


def open_grpc() -> ProfileExporter:
    """Opens the OTLP/gRPC exporter that the environment configures."""
    return open_client(dataclasses.replace(read_settings(), protocol="grpc"))


def open_http() -> ProfileExporter:
    """Opens the OTLP/HTTP exporter that the environment configures."""
    settings = read_settings()
    if not settings.protocol.startswith("http"):
        settings = dataclasses.replace(settings, protocol="http/protobuf")
    return open_client(settings)


def open_json_file() -> ProfileExporter:
    """Opens an exporter that appends OTLP JSON to the file named by ``OTEL_KPROFILER_FILE``."""
    return FileExporter(os.environ.get(OTEL_KPROFILER_FILE) or "-", form=Form.JSON)


def find_exporters(
    environ: Mapping[str, str], otlp: ClientSettings | None = None
) -> list[ExporterFactory]:
    """Returns a factory for each exporter in ``OTEL_PROFILES_EXPORTER``; none for ``none``.

    As for other signals, the ``otlp`` exporter means ``otlp_proto_grpc`` unless
    ``OTEL_EXPORTER_OTLP_[PROFILES_]PROTOCOL`` specifies another protocol. The ``otlp`` argument
    replaces that exporter's settings from the environment. Any other name must be an entry point in
    the ``opentelemetry_profiles_exporter`` group: a callable without arguments that returns a
    :class:`ProfileExporter`. Raises one ``ConfigError`` that lists all problems.
    """
    names = [name.strip() for name in (environ.get(OTEL_PROFILES_EXPORTER) or "otlp").split(",")]
    if names == ["none"]:
        return []
    exporters, mistakes = [], []
    for name in filter(None, names):
        try:
            exporters.append(_find_by_name(name, environ, otlp))
        except ConfigError as error:
            mistakes.append(error)
    if mistakes:
        raise ConfigError.merge(mistakes)
    return exporters


def _find_by_name(
    name: str, environ: Mapping[str, str], otlp: ClientSettings | None
) -> ExporterFactory:
    if name == "otlp" and otlp is not None:
        return functools.partial(open_client, otlp)
    if name in {"otlp", "otlp_proto_grpc", "otlp_proto_http"}:
        settings = read_settings(environ)
        if name == "otlp":
            name = "otlp_proto_grpc" if settings.protocol == "grpc" else "otlp_proto_http"
    return _find_exporter(name)


def _find_exporter(name: str) -> ExporterFactory:
    matching = tuple(entry_points(group=GROUP, name=name))
    if not matching:
        installed = sorted({point.name for point in entry_points(group=GROUP)})
        raise ConfigError(
            [
                ConfigProblem(
                    "environment", 0, 0, OTEL_PROFILES_EXPORTER, f"there is no exporter {name!r}"
                )
            ],
            hint=f"use none, otlp, {', '.join(installed)}, or install the exporter's package",
        )

    def open_exporter() -> ProfileExporter:
        exporter = matching[0].load()()
        if not isinstance(exporter, ProfileExporter):
            message = f"{name} returns a {type(exporter).__name__}, not a ProfileExporter"
            raise ConfigError([ConfigProblem("environment", 0, 0, OTEL_PROFILES_EXPORTER, message)])
        return exporter

    return open_exporter
