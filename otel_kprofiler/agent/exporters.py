"""From the configuration's exporters to running ones, each behind its queue.

Settings are taken by the type that begins an exporter's id, not by their class: the agent has
plain copies of the configuration (see :mod:`otel_kprofiler.config`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from otel_kprofiler.export import (
    DebugExporter,
    ExportQueue,
    ExportResult,
    FileExporter,
    ProfileExporter,
    RetryPolicy,
    Rotation,
    Tls,
    Verbosity,
)
from otel_kprofiler.model import Form

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Debug, Exporter, File, OtlpGrpc, OtlpHttp

ExportObserver = Callable[[ProfileExporter, ExportResult, float], None]
"""Told of each export: the exporter, its result, and the seconds it took."""

_FORMS: Final = {"json": Form.JSON, "proto": Form.PROTOBUF}
_DAY_S: Final = 86_400


def _open_grpc(name: str, settings: OtlpGrpc) -> ProfileExporter:
    from otel_kprofiler.export import OtlpGrpcExporter  # noqa: PLC0415 - 20 MB

    return OtlpGrpcExporter(
        settings.endpoint,
        tls=Tls(
            insecure=settings.tls.insecure,
            ca_file=settings.tls.ca_file or None,
            cert_file=settings.tls.cert_file or None,
            key_file=settings.tls.key_file or None,
        ),
        name=name,
        **_client_options(settings),
    )


def _open_http(name: str, settings: OtlpHttp) -> ProfileExporter:
    from otel_kprofiler.export import OtlpHttpExporter  # noqa: PLC0415 - 9 MB

    return OtlpHttpExporter(
        settings.endpoint,
        form=_FORMS[settings.encoding],
        tls=Tls(
            ca_file=settings.tls.ca_file or None,
            cert_file=settings.tls.cert_file or None,
            key_file=settings.tls.key_file or None,
            insecure_skip_verify=settings.tls.insecure_skip_verify,
        ),
        proxy_url=settings.proxy_url,
        name=name,
        **_client_options(settings),
    )


def _client_options(settings: OtlpGrpc | OtlpHttp) -> dict[str, Any]:
    retry = settings.retry_on_failure
    return {
        "headers": {name: value.get_secret_value() for name, value in settings.headers.items()},
        "compression": settings.compression,
        "timeout_s": settings.timeout.seconds,
        "retry": RetryPolicy(
            enabled=retry.enabled,
            initial_interval_s=retry.initial_interval.seconds,
            multiplier=retry.multiplier,
            randomization_factor=retry.randomization_factor,
            max_interval_s=retry.max_interval.seconds,
            max_elapsed_time_s=retry.max_elapsed_time.seconds,
        ),
        "max_bytes": settings.max_message_bytes,
    }


def _open_file(name: str, settings: File) -> ProfileExporter:
    keep = settings.rotation
    rotation = None
    if keep is not None:
        rotation = Rotation(
            max_bytes=keep.max_megabytes * 1024 * 1024,
            max_backups=keep.max_backups,
            max_backup_age_s=keep.max_days * _DAY_S,
        )
    form = _FORMS[settings.format]
    return FileExporter(settings.path, form=form, rotation=rotation, name=name)


def _open_debug(name: str, settings: Debug) -> ProfileExporter:
    return DebugExporter(verbosity=Verbosity(settings.verbosity), name=name)


_OPENERS: Final[dict[str, Callable[[str, Any], ProfileExporter]]] = {
    "otlp_grpc": _open_grpc,
    "otlp_http": _open_http,
    "file": _open_file,
    "debug": _open_debug,
}


def open_exporter(name: str, settings: Exporter) -> ProfileExporter:
    """Make the exporter with an id (``type`` or ``type/name``).

    Raises:
        ExportError: a file or a certificate is unusable.
    """
    return _OPENERS[name.partition("/")[0]](name, settings)


def open_queues(config: Config, observer: ExportObserver | None = None) -> list[ExportQueue]:
    """Make the exporters that run, each behind a queue; closes the others if one fails."""
    exporters: list[ProfileExporter] = []
    try:
        for name, settings in config.running_exporters.items():
            exporters.append(open_exporter(name, settings))
    except BaseException:
        for exporter in exporters:
            exporter.shutdown(0)
        raise
    return [
        _queue(exporter, settings, observer)
        for exporter, settings in zip(exporters, config.running_exporters.values(), strict=True)
    ]


def _queue(
    exporter: ProfileExporter, settings: Any, observer: ExportObserver | None
) -> ExportQueue:
    def tell(result: ExportResult, seconds: float) -> None:
        if observer:
            observer(exporter, result, seconds)

    queue = getattr(settings, "sending_queue", None)
    if queue is None:
        return ExportQueue(exporter, on_export=tell)
    return ExportQueue(exporter, size=queue.queue_size if queue.enabled else 1, on_export=tell)
