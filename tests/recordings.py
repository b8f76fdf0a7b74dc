"""Writes small recordings for tests."""

from otel_kprofiler.host import Access
from otel_kprofiler.recording import RecordingFacts, RecordingWriter
from tests.records import in_ring

TEXT = 0xFFFFFFFF81000000
PERIOD_NS = 10_000_000


def write_recording(directory, functions, records, counts, **facts):
    """Writes a recording of a kernel with functions at the given addresses. Returns its path."""
    symbols = {"_text": TEXT, **functions, "_etext": TEXT + 0x1000000}
    kallsyms = directory / "host" / "proc" / "kallsyms"
    kallsyms.parent.mkdir(parents=True)
    kallsyms.write_text("".join(f"{at:x} T {name}\n" for name, at in symbols.items()))
    path = str(directory / "recording")
    writer = RecordingWriter(path)
    writer.capture(Access(str(directory / "host")))
    writer.add_records(b"".join(map(in_ring, records)), 150)
    writer.finish(RecordingFacts(10**18, PERIOD_NS, 1016, 500, counts, **facts))
    return path
