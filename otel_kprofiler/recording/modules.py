"""Modules that come and go, in and out of recordings.

Two streams of a recording: ``uevents``, the kernel's datagrams about modules with the boot time
at which they were received, and ``modules``, the readings of one poll as a JSON list.
"""

from __future__ import annotations

import json
from typing import Final

from otel_kprofiler.recording.ksymbols import EventSink
from otel_kprofiler.recording.recording import EventReader, Recording
from otel_kprofiler.symbols import ModuleReading, ReadingPacker, ReadingUnpacker, Snapshot
from otel_kprofiler.tracking import ModuleWatch

_READINGS: Final = "modules"
_UEVENTS: Final = "uevents"


class RecordedModules:
    """Passes on what is told of modules, and writes it down. For one thread.

    Args:
        watch: the running kernel.
        sink: where to write.
    """

    def __init__(self, watch: ModuleWatch, sink: EventSink) -> None:
        self._watch = watch
        self._sink = sink
        self._packer = ReadingPacker()

    def begin(self, snapshot: Snapshot) -> None:
        """Start from what was there at first."""
        self._watch.begin(snapshot)

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Readings since the last call."""
        readings, complete_ns = self._watch.poll(now_ns)
        for time_ns, datagram in self._watch.take_datagrams():
            self._sink(_UEVENTS, time_ns, datagram)
        if readings:
            rows = [self._packer.pack(reading) for reading in readings]
            self._sink(_READINGS, complete_ns, json.dumps(rows).encode())
        return readings, complete_ns

    def close(self) -> None:
        """Close the watch."""
        self._watch.close()


class ReplayedModules:
    """The readings of a recording, as far as they had come at the time that is asked for.

    Raises ``KProfilerError`` when the recording is damaged.
    """

    def __init__(self, recording: Recording) -> None:
        unpack = ReadingUnpacker().unpack
        self._readings = EventReader(recording, _READINGS, lambda rows: map(unpack, rows))

    def begin(self, snapshot: Snapshot) -> None:
        """Nothing to do: readings tell all modules."""

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Readings up to a recorded boot time that were not returned yet."""
        return self._readings.poll(now_ns)

    def close(self) -> None:
        """Nothing to do; the recording belongs to the caller."""
