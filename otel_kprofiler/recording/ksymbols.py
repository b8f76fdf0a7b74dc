"""Records and replays ksymbol changes (BPF programs and other code outside modules).

There are two streams of JSON payloads. A ``code`` event lists the changes returned by a poll, each
as ``[time_ns, action, [symbol, …], until_ns]``. A ``code_details`` event contains the details of a
symbol, as ``[symbol, program, [[offset, file, line], …]]``. A symbol is ``[start, length, name,
kind, since_ns, program_id]``, and a program consists of the fields of ``BpfProgram``.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from otel_kprofiler.checked import checked_number, checked_text
from otel_kprofiler.model import (
    BpfProgram,
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
    ModuleKind,
)
from otel_kprofiler.recording.recording import EventReader, Recording
from otel_kprofiler.symbols import KsymbolSource

_CHANGES: Final = "code"
_DETAILS: Final = "code_details"

EventSink = Callable[[str, int, bytes], None]
"""A function that receives an event, with the parameters of ``RecordingWriter.add_event``.
"""


class RecordedKsymbols:
    """Forwards ksymbol changes from ``source``, and records them in ``sink``; not thread-safe."""

    def __init__(self, source: KsymbolSource, sink: EventSink) -> None:
        self._source = source
        self._sink = sink
        self._complete_until_ns = 0

    def poll(self, now_ns: int) -> KsymbolBatch:
        """Returns the changes since the last call."""
        batch = self._source.poll(now_ns)
        self._complete_until_ns = batch.complete_until_ns
        if batch.changes:
            rows = [
                (time_ns, action.value, [_pack(symbol) for symbol in symbols], until_ns)
                for time_ns, action, symbols, until_ns in batch.changes
            ]
            self._sink(_CHANGES, batch.complete_until_ns, json.dumps(rows).encode())
        return batch

    def describe(self, symbol: Ksymbol) -> KsymbolDetails | None:
        """Returns the details of a function in a BPF program."""
        details = self._source.describe(symbol)
        if details is not None:
            row = (_pack(symbol), *details)
            self._sink(_DETAILS, self._complete_until_ns, json.dumps(row).encode())
        return details

    def count_lost(self) -> Mapping[str, int]:
        """Returns the number of records lost so far, by cause."""
        return self._source.count_lost()

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class ReplayedKsymbols:
    """Replays ksymbol changes. Raises ``KProfilerError`` if the recording is malformed."""

    def __init__(self, recording: Recording) -> None:
        self._changes = EventReader(recording, _CHANGES, _parse_changes)
        details, _ = EventReader(recording, _DETAILS, _parse_details).poll()
        self._details = dict(details)

    def poll(self, now_ns: int) -> KsymbolBatch:
        """Returns the changes up to ``now_ns`` that have not been returned yet."""
        return KsymbolBatch(*self._changes.poll(now_ns))

    def describe(self, symbol: Ksymbol) -> KsymbolDetails | None:
        """Returns the recorded details of a function."""
        return self._details.get(symbol)

    def count_lost(self) -> Mapping[str, int]:
        """Returns an empty mapping, because replays lose no records."""
        return {}

    def close(self) -> None:
        """Does nothing, because the caller closes the recording."""


def _parse_changes(rows: Any) -> list[KsymbolChange]:
    return [
        KsymbolChange(
            checked_number(time_ns),
            KsymbolAction(action),
            tuple(map(_unpack, symbols)),
            checked_number(until_ns),
        )
        for time_ns, action, symbols, until_ns in rows
    ]


def _parse_details(row: Any) -> list[tuple[Ksymbol, KsymbolDetails]]:
    symbol, program, lines = row
    rows = tuple(
        (checked_number(offset), checked_text(file), checked_number(line))
        for offset, file, line in lines
    )
    number, kind, tag, load_time_ns, attached_to = program
    described = BpfProgram(
        checked_number(number),
        checked_text(kind),
        checked_text(tag),
        checked_number(load_time_ns),
        checked_text(attached_to),
    )
    return [(_unpack(symbol), KsymbolDetails(described, rows))]


def _pack(symbol: Ksymbol) -> tuple[str | int, ...]:
    start, length, name, kind, since_ns, program_id = symbol
    return start, length, name, kind.value, since_ns, program_id


def _unpack(fields: Any) -> Ksymbol:
    start, length, name, kind, since_ns, program_id = fields
    return Ksymbol(
        checked_number(start),
        checked_number(length),
        checked_text(name),
        ModuleKind(kind),
        checked_number(since_ns),
        checked_number(program_id),
    )
