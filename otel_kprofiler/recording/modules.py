"""Records and replays the loading and unloading of modules.

The recording contains two streams. ``uevents`` contains the kernel's module uevents, each with the
boottime at which it was received. ``modules`` contains the results of each poll, as a JSON list of
:class:`ModuleReading`.
"""

import json
from typing import Final

from otel_kprofiler.recording.ksymbols import EventSink
from otel_kprofiler.recording.recording import EventReader, Recording
from otel_kprofiler.symbols import ModuleReading, ReadingPacker, ReadingUnpacker, Snapshot
from otel_kprofiler.tracking import ModuleWatch

_READINGS: Final = "modules"
_UEVENTS: Final = "uevents"


class RecordedModules:
    """Forwards the modules read by ``watch``, and records them in ``sink``; not thread-safe."""

    def __init__(self, watch: ModuleWatch, sink: EventSink) -> None:
        self._watch = watch
        self._sink = sink
        self._packer = ReadingPacker()

    def begin(self, snapshot: Snapshot) -> None:
        """Start from the modules in the first snapshot."""
        self._watch.begin(snapshot)

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Returns new module scans, and the ``CLOCK_BOOTTIME`` up to which they are complete."""
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
    """Replays the recorded modules. Raises ``KProfilerError`` if the recording is malformed."""

    def __init__(self, recording: Recording) -> None:
        unpack = ReadingUnpacker().unpack
        self._readings = EventReader(recording, _READINGS, lambda rows: map(unpack, rows))

    def begin(self, snapshot: Snapshot) -> None:
        """Does nothing, because every :class:`ModuleReading` contains all modules."""

    def poll(self, now_ns: int) -> tuple[list[ModuleReading], int]:
        """Returns the module scans up to ``now_ns`` that have not yet been returned."""
        return self._readings.poll(now_ns)

    def close(self) -> None:
        """Does nothing, because the caller closes the recording."""
