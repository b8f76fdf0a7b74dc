"""Opens the configured exporters, each with its own queue, and replaces them on a reload."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from otel_kprofiler.export import (
    ExporterSettings,
    ExportQueue,
    ExportResult,
    ProfileExporter,
    Spool,
)

ExportObserver = Callable[[str, ExportResult, float], None]
"""Function called after each export with the exporter's id, result and duration in seconds."""


class OpenedExporter(NamedTuple):
    """An exporter that is not yet running, with the spool that its queue will use, if any."""

    exporter: ProfileExporter
    spool: Spool | None

    def close(self) -> None:
        """Close the exporter and its spool."""
        self.exporter.shutdown(0)
        if self.spool:
            self.spool.close()


Opened = Mapping[str, OpenedExporter]
"""Exporters that are not running yet, by id."""


class RunningExporter(NamedTuple):
    """An exporter's settings and its queue."""

    settings: ExporterSettings
    queue: ExportQueue


Wanted = Mapping[str, ExporterSettings]
"""The exporters in a configuration, by id."""
Running = Mapping[str, RunningExporter]


def open_changed(running: Running, wanted: Wanted) -> dict[str, OpenedExporter]:
    """Open new and changed exporters. On ``ExportError``, close the exporters opened so far."""
    opened: dict[str, OpenedExporter] = {}
    try:
        for name, settings in wanted.items():
            old = running.get(name)
            if old and old.settings == settings:
                continue
            exporter = settings.open(name)
            opened[name] = OpenedExporter(exporter, None)
            if not (old and _takes_over(old, exporter, settings)):
                spool = settings.queue.spool
                opened[name] = OpenedExporter(exporter, spool.open(name) if spool else None)
    except BaseException:
        close_exporters(opened)
        raise
    return opened


def close_exporters(opened: Opened) -> None:
    """Close exporters that have not been started yet."""
    for exporter in opened.values():
        exporter.close()


def put_in_place(
    running: Running, wanted: Wanted, opened: Opened, observer: ExportObserver
) -> dict[str, RunningExporter]:
    """Assign each exporter its predecessor's queue if compatible, or else a new queue."""
    placed = {}
    for name, settings in wanted.items():
        fresh, old = opened.get(name), running.get(name)
        if old and fresh is None:
            placed[name] = old
        elif old and fresh and _takes_over(old, fresh.exporter, settings):
            old.queue.replace(fresh.exporter, size=settings.queue.size)
            placed[name] = RunningExporter(settings, old.queue)
        elif fresh:
            queue = ExportQueue(
                fresh.exporter,
                size=settings.queue.size,
                on_export=functools.partial(observer, name),
                spool=fresh.spool,
            )
            placed[name] = RunningExporter(settings, queue)
    return placed


def _takes_over(running: RunningExporter, new: ProfileExporter, settings: ExporterSettings) -> bool:
    """Returns whether the new exporter can send the batches queued for the running one."""
    old = running.queue.exporter
    if old.form is not new.form or running.settings.queue.spool != settings.queue.spool:
        return False
    return new.max_bytes is None or (old.max_bytes is not None and old.max_bytes <= new.max_bytes)
