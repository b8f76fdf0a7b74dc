"""Replays a recording through the sampler interface."""

from collections.abc import Mapping

from otel_kprofiler.bpf import WaitRecords, number_kinds, parse_records
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    KINDS,
    OFF_CPU,
    ProcessKey,
    ProfileKind,
    RawSample,
    SampleCounts,
    WaitTotals,
)
from otel_kprofiler.recording.recording import Recording
from otel_kprofiler.sampling import SamplerCounts, WaitJoiner


class ReplaySampler:
    """Replays the samples in a recording, one recorded drain per call, without delay.

    Also serves as the recorded host's clock, for ``Clock(sampler)``. The clock reports the time
    up to which samples have been returned. The caller closes the recording.
    """

    def __init__(self, recording: Recording) -> None:
        self._facts = recording.facts
        self._blocks = recording.blocks()
        self._received = SampleCounts()
        self._joiner = WaitJoiner()
        self._kind_numbers = number_kinds(recording.facts.events)
        self._complete_until_ns = recording.facts.since_ns or self._find_start(recording)
        self.exhausted = self._has_read_waits = False

    @property
    def period_ns(self) -> int:
        """Returns the sampling period on each CPU."""
        return self._facts.period_ns

    @property
    def kinds(self) -> tuple[ProfileKind, ...]:
        """Returns the kinds of samples that may occur, in the order of a window's profiles."""
        return (*KINDS, *self._facts.events)

    def start(self) -> None:
        """Does nothing."""

    def wait(self, timeout_s: float) -> None:
        """Return immediately."""

    def wait_new(self, least_s: float, most_s: float) -> None:
        """Return immediately."""

    def wait_first(self, timeout_s: float) -> bool:
        """Return immediately."""
        return True

    def wake(self) -> None:
        """Does nothing, because :meth:`wait_first` never blocks."""

    def drain(self) -> list[RawSample]:
        """Returns the next drain's samples, or sets :attr:`exhausted` after the last drain."""
        block = next(self._blocks, None)
        if block is None:
            self.exhausted = True
            self._complete_until_ns = max(self._complete_until_ns, self._facts.until_ns)
            return []
        self._complete_until_ns, data = block
        records = WaitRecords([], [])
        samples = self._parse(data, records) + self._joiner.join(records.waits)
        self._joiner.forget(records.ended)
        self._received.update(sample.kind.name for sample in samples)
        return samples

    def _find_start(self, recording: Recording) -> int:
        """Returns the time of the first sample, for recordings that lack a start time."""
        _, data = next(recording.blocks(), (0, b""))
        records = WaitRecords([], [])
        samples = self._parse(data, records) + [record.sample for record in records.waits]
        return min([sample.time_ns for sample in samples], default=self._facts.until_ns)

    def _parse(self, data: bytes, records: WaitRecords) -> list[RawSample]:
        try:
            return parse_records(data, self._facts.stack_limit, records, self._kind_numbers)
        except ValueError as error:
            raise KProfilerError(f"the recording is corrupt: {error}") from error

    def complete_until_ns(self) -> int:
        """Returns the recorded boottime before which every sample has been returned."""
        return self._complete_until_ns

    def read_waits(self) -> Mapping[ProcessKey, WaitTotals]:
        """Returns the recorded wait totals, but only in the first call after the last sample."""
        if not self.exhausted or self._has_read_waits:
            return {}
        self._has_read_waits = True
        return {
            process: totals._replace(has_ended=True)
            for process, totals in self._facts.waits.items()
        }

    @property
    def wait_threshold_ns(self) -> int:
        """Returns the last wait threshold, above which all waits were sampled; 0 if unknown."""
        return self._facts.wait_threshold_ns

    def boot_ns(self) -> int:
        """Returns the ``CLOCK_BOOTTIME`` timestamp, in ns, that the replay has reached."""
        return self._complete_until_ns

    def unix_ns(self) -> int:
        """Returns the Unix time, in ns, that the replay has reached."""
        return self._complete_until_ns + self._facts.offset_ns

    def counts(self) -> Mapping[str, SamplerCounts]:
        """Returns the recorded counters. ``received`` counts the samples returned so far."""
        kinds = {}
        for kind, counts in self._facts.counts.items():
            received, taken = self._received[kind], counts.taken
            if kind == OFF_CPU.name:  # a wait is recorded when it ends
                taken = received + sum(counts.lost.values())
            kinds[kind] = counts._replace(taken=taken, received=received)
        return kinds

    def stop(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing, because the caller closes the recording."""
