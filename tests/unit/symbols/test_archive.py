"""Reads of module symbols are replayed as recorded."""

import json

import pytest
from module_host import INIT, TEXT, Host, boot_ns, frame, settle, wait_for_name

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.recording import (
    RecordedModules,
    Recording,
    RecordingFacts,
    RecordingWriter,
    ReplayedModules,
)
from otel_kprofiler.sampling import SamplerCounts
from otel_kprofiler.symbols import KernelSymbolizer, ReadingUnpacker
from otel_kprofiler.symbols.kernel.archive import _make_lines
from otel_kprofiler.symbols.kernel.kallsyms import parse_kallsyms
from otel_kprofiler.tracking import ModuleWatch


@pytest.fixture
def recording(tmp_path):
    """Returns a recording in which a module is loaded, unloaded, and reloaded with new code."""
    (tmp_path / "host").mkdir()
    host = Host(tmp_path / "host")
    writer = RecordingWriter(str(tmp_path / "raw"))
    writer.capture(host.files)
    watch = ModuleWatch(host.files, lambda: host.events, keep_datagrams=True)
    symbolizer = KernelSymbolizer.live(host.files, modules=RecordedModules(watch, writer.add_event))
    settle(symbolizer)
    times = []
    for prefix in ("", "other_"):
        host.load("fresh", prefix=prefix)
        settle(symbolizer)
        wait_for_name(symbolizer, TEXT + 0x14, f"{prefix}fresh_a")
        times.append(boot_ns())
        settle(symbolizer)
        host.unload("fresh")
        settle(symbolizer)
    symbolizer.close()
    writer.finish(RecordingFacts(0, 1, 127, boot_ns(), {"on_cpu": SamplerCounts(0, {}, 0, {})}))
    return Recording(str(tmp_path / "raw")), times


def test_a_replay_names_modules_as_on_the_recorded_host(recording):
    file, times = recording
    symbolizer = KernelSymbolizer.live(file.files, modules=ReplayedModules(file))
    assert frame(symbolizer, TEXT + 0x14).module is None
    symbolizer.advance(boot_ns())
    for time_ns, name in zip(times, ("fresh_a", "other_fresh_a"), strict=True):
        assert frame(symbolizer, TEXT + 0x14, time_ns).function == name
    assert frame(symbolizer, TEXT + 0x14).module is None
    assert frame(symbolizer, INIT, times[1]).module is None
    file.close()


def test_a_recording_contains_the_uevent_datagrams(recording):
    file, _ = recording
    actions = [data.split(b"@")[0] for _, data in file.blocks("events/uevents")]
    assert actions == [b"add", b"remove", b"add", b"remove"]
    file.close()


def test_module_symbols_survive_a_round_trip(modules):
    for symbols in modules.snapshot.loaded():
        if symbols.table is None:
            continue
        name = symbols.module.name
        lines = _make_lines(symbols.table, name).encode("utf-8", "surrogateescape")
        again = parse_kallsyms([lines]).blocks[name]
        for index in range(len(symbols.table)):
            symbol = symbols.table.symbol(index)
            for address in (symbol.start - 1, symbol.start, symbol.end - 1, symbol.end):
                assert again.lookup(address) == symbols.table.lookup(address), symbol


@pytest.mark.parametrize("row", [None, {}, [], {"new": {"1": []}}, {"new": {}, "modules": [3]}])
def test_malformed_module_records_in_a_recording_are_rejected(row):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        ReadingUnpacker().unpack(json.loads(json.dumps(row)))


def test_malformed_module_data_in_a_recording_is_an_error():
    class Damaged:
        def blocks(self, _):
            return iter([(5, b'[{"new": 3}]')])

    with pytest.raises(KProfilerError, match="corrupt"):
        ReplayedModules(Damaged()).poll(9)
