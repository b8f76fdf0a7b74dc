"""Ksymbol changes are replayed as recorded."""

import zipfile

import pytest

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    BpfProgram,
    Ksymbol,
    KsymbolAction,
    KsymbolBatch,
    KsymbolChange,
    KsymbolDetails,
    ModuleKind,
)
from otel_kprofiler.recording import (
    RecordedKsymbols,
    Recording,
    RecordingFacts,
    RecordingWriter,
    ReplayedKsymbols,
)
from otel_kprofiler.sampling import SamplerCounts

ONE = Ksymbol(0xFFFFFFFFC0000000, 64, "bpf_prog_1_ü", ModuleKind.BPF, 5, 7)
PAGE = Ksymbol(0xFFFFFFFFC0001000, 4096, "kprobe_insn_page", ModuleKind.OUT_OF_LINE)
BATCHES = [
    KsymbolBatch([KsymbolChange(1, KsymbolAction.ALL_READ, (ONE, PAGE))], 10),
    KsymbolBatch([], 20),
    KsymbolBatch([KsymbolChange(12, KsymbolAction.REMOVED, (ONE,))], 30),
]
DETAILS = KsymbolDetails(BpfProgram(7, "xdp", "1" * 16, 5, ""), ((0, "a.c", 1), (4, "b.c", 2)))


class Source:
    def __init__(self):
        self.batches = iter(BATCHES)

    def poll(self, now_ns):
        return next(self.batches)

    def describe(self, symbol):
        return DETAILS if symbol is ONE else None

    def close(self):
        self.batches = iter(())


def record(path):
    writer = RecordingWriter(str(path))
    recorded = RecordedKsymbols(Source(), writer.add_event)
    assert [recorded.poll(0) for _ in BATCHES] == BATCHES
    assert (recorded.describe(ONE), recorded.describe(PAGE)) == (DETAILS, None)
    recorded.close()
    writer.finish(RecordingFacts(0, 1, 1016, 40, {"on_cpu": SamplerCounts(0, {}, 0, {})}))


def test_a_replay_returns_ksymbol_changes_up_to_the_requested_time(tmp_path):
    record(tmp_path / "x.raw")
    recording = Recording(str(tmp_path / "x.raw"))
    replayed = ReplayedKsymbols(recording)
    assert replayed.poll(10) == BATCHES[0]
    assert replayed.poll(5) == KsymbolBatch([], 10)
    assert replayed.poll(11) == BATCHES[2]
    assert replayed.poll(31) == KsymbolBatch([], 1 << 63), "nothing more will come"
    assert replayed.describe(ONE) == DETAILS
    assert replayed.describe(PAGE) is None
    recording.close()


def test_a_malformed_event_stream_in_a_recording_is_an_error(tmp_path):
    record(tmp_path / "x.raw")
    with zipfile.ZipFile(tmp_path / "x.raw", "a") as archive:
        archive.writestr("events/code/000001", bytes(8) + b"\4\0\0\0[[1]")
    recording = Recording(str(tmp_path / "x.raw"))
    with pytest.raises(KProfilerError, match="corrupt"):
        ReplayedKsymbols(recording).poll(1 << 62)
    recording.close()
