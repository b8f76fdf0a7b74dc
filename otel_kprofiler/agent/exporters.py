"""From the configuration's exporters to running ones, each behind its queue.

Settings are taken by the type that begins an exporter's id, not by their class: the agent has
plain copies of the configuration (see :mod:`otel_kprofiler.config`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from otel_kprofiler.export import (
    DEFAULT_QUEUE_SIZE,
    DebugExporter,
    ExportQueue,
    ExportResult,
    FileExporter,
    ProfileExporter,
    RetryPolicy,
    Rotation,
    Spool,
    Tls,
    Verbosity,
)
from otel_kprofiler.model import AttributeForm, Form

if TYPE_CHECKING:
    from otel_kprofiler.config import Config, Debug, Exporter, File, OtlpGrpc, OtlpHttp

ExportObserver = Callable[[str, ExportResult, float], None]
"""Told of each export: the exporter's id, its result, and the seconds it took."""

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
        proxy_url=settings.proxy_url,
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
        "attributes": AttributeForm(settings.attributes),
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
    return FileExporter(
        settings.path,
        form=_FORMS[settings.format],
        rotation=rotation,
        attributes=AttributeForm(settings.attributes),
        name=name,
    )


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


class OpenedExporter(NamedTuple):
    """An exporter that has no queue yet, and the spool for a queue of its own, if it has one."""

    exporter: ProfileExporter
    spool: Spool | None

    def close(self) -> None:
        """Give everything back."""
        self.exporter.shutdown(0)
        if self.spool:
            self.spool.close()


Opened = Mapping[str, OpenedExporter]
"""What is to be put in place, by id."""


class RunningExporter(NamedTuple):
    """An exporter's settings and its queue."""

    settings: Any
    queue: ExportQueue


Running = Mapping[str, RunningExporter]
"""The exporters that run, by id."""


def open_changed(running: Running, config: Config) -> dict[str, OpenedExporter]:
    """Make the exporters that are new or have other settings than before.

    Raises:
        ExportError: one of them cannot be made; those that were made are closed.
    """
    opened: dict[str, OpenedExporter] = {}
    try:
        for name, settings in config.running_exporters.items():
            before = running.get(name)
            if before and before.settings == settings:
                continue
            exporter = open_exporter(name, settings)
            opened[name] = OpenedExporter(exporter, None)
            if not (before and _takes_over(before, exporter, settings)):
                opened[name] = OpenedExporter(exporter, _open_spool(name, settings))
    except BaseException:
        close_exporters(opened)
        raise
    return opened


def close_exporters(opened: Opened) -> None:
    """Close exporters that have not got a queue yet."""
    for one in opened.values():
        one.close()


def put_in_place(
    running: Running,
    config: Config,
    opened: Opened,
    observer: ExportObserver,
) -> dict[str, RunningExporter]:
    """Give every exporter its queue: the one that is there if what waits in it fits."""
    placed = {}
    for name, settings in config.running_exporters.items():
        fresh, before = opened.get(name), running.get(name)
        if before and fresh is None:
            placed[name] = before
        elif before and fresh and _takes_over(before, fresh.exporter, settings):
            before.queue.replace(fresh.exporter, size=_queue_size(settings))
            placed[name] = RunningExporter(settings, before.queue)
        elif fresh:
            queue = ExportQueue(
                fresh.exporter,
                size=_queue_size(settings),
                on_export=functools.partial(observer, name),
                spool=fresh.spool,
            )
            placed[name] = RunningExporter(settings, queue)
    return placed


def _takes_over(before: RunningExporter, new: ProfileExporter, settings: Any) -> bool:
    """Whether what waits for one exporter can be sent by the other."""
    old = before.queue.exporter
    if old.form is not new.form or _storage(before.settings) != _storage(settings):
        return False
    return new.max_bytes is None or (old.max_bytes is not None and old.max_bytes <= new.max_bytes)


def _storage(settings: Any) -> tuple[object, ...]:
    queue = getattr(settings, "sending_queue", None)
    if queue is None or not queue.enabled or not queue.storage:
        return ()
    return queue.storage, queue.max_megabytes, queue.max_age.seconds, queue.fsync


def _open_spool(name: str, settings: Any) -> Spool | None:
    if not _storage(settings):
        return None
    queue = settings.sending_queue
    return Spool(
        os.path.join(queue.storage, quote(name, safe="")),
        max_bytes=queue.max_megabytes * 1024 * 1024,
        max_age_s=queue.max_age.seconds,
        fsync=queue.fsync == "always",
    )


def _queue_size(settings: Any) -> int:
    queue = getattr(settings, "sending_queue", None)
    if queue is None:
        return DEFAULT_QUEUE_SIZE
    return int(queue.queue_size) if queue.enabled else 1
