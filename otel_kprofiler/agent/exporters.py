"""From the configuration's exporters to running ones, each behind its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from otel_kprofiler.config import Config, Debug, Exporter, File, OtlpGrpc, OtlpHttp, RetryOnFailure
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

ExportObserver = Callable[[ProfileExporter, ExportResult, float], None]
"""Told of each export: the exporter, its result, and the seconds it took."""

_FORMS: Final = {"json": Form.JSON, "proto": Form.PROTOBUF}
_DAY_S: Final = 86_400


def open_exporter(name: str, settings: Exporter) -> ProfileExporter:
    """Make one exporter. Raises ``ExportError`` if a file or a certificate is unusable."""
    match settings:
        case OtlpGrpc():
            from otel_kprofiler.export import OtlpGrpcExporter  # noqa: PLC0415 - 20 MB

            return OtlpGrpcExporter(
                settings.endpoint,
                headers=_headers(settings),
                tls=Tls(
                    settings.tls.insecure,
                    settings.tls.ca_file or None,
                    settings.tls.cert_file or None,
                    settings.tls.key_file or None,
                ),
                compression=settings.compression,
                timeout_s=settings.timeout.seconds,
                retry=_retry(settings.retry_on_failure),
                max_bytes=settings.max_message_bytes,
                name=name,
            )
        case OtlpHttp():
            from otel_kprofiler.export import OtlpHttpExporter  # noqa: PLC0415 - 9 MB

            return OtlpHttpExporter(
                settings.endpoint,
                form=_FORMS[settings.encoding],
                headers=_headers(settings),
                tls=Tls(
                    ca_file=settings.tls.ca_file or None,
                    cert_file=settings.tls.cert_file or None,
                    key_file=settings.tls.key_file or None,
                    insecure_skip_verify=settings.tls.insecure_skip_verify,
                ),
                proxy_url=settings.proxy_url,
                compression=settings.compression,
                timeout_s=settings.timeout.seconds,
                retry=_retry(settings.retry_on_failure),
                max_bytes=settings.max_message_bytes,
                name=name,
            )
        case File():
            return FileExporter(
                settings.path, form=_FORMS[settings.format], rotation=_rotation(settings), name=name
            )
        case Debug():
            return DebugExporter(verbosity=Verbosity(settings.verbosity), name=name)


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
    exporter: ProfileExporter, settings: Exporter, observer: ExportObserver | None
) -> ExportQueue:
    def tell(result: ExportResult, seconds: float) -> None:
        if observer:
            observer(exporter, result, seconds)

    if isinstance(settings, OtlpGrpc | OtlpHttp):
        queue = settings.sending_queue
        return ExportQueue(exporter, size=queue.queue_size if queue.enabled else 1, on_export=tell)
    return ExportQueue(exporter, on_export=tell)


def _rotation(settings: File) -> Rotation | None:
    rotation = settings.rotation
    if rotation is None:
        return None
    return Rotation(
        max_bytes=rotation.max_megabytes * 1024 * 1024,
        max_backups=rotation.max_backups,
        max_backup_age_s=rotation.max_days * _DAY_S,
    )


def _headers(settings: OtlpGrpc | OtlpHttp) -> dict[str, str]:
    return {name: secret.get_secret_value() for name, secret in settings.headers.items()}


def _retry(settings: RetryOnFailure) -> RetryPolicy:
    return RetryPolicy(
        enabled=settings.enabled,
        initial_interval_s=settings.initial_interval.seconds,
        multiplier=settings.multiplier,
        randomization_factor=settings.randomization_factor,
        max_interval_s=settings.max_interval.seconds,
        max_elapsed_time_s=settings.max_elapsed_time.seconds,
    )
