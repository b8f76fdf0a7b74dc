"""The libbpf and BCC loaders load the same programs from the same source, and explain failures."""

import os
import signal

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.bpf import (
    PROGRAMS,
    SAMPLER_OBJECT,
    SAMPLER_SOURCE,
    BccLoader,
    LibbpfLoader,
    ObjectSpec,
    bcc,
)
from otel_kprofiler.errors import KernelFeatureError, SamplerError
from otel_kprofiler.host import Access, read_release
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from tests.further import further
from tests.needs import LIBBPF

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not BccLoader.is_installed(), reason="python3-bpfcc is not installed"),
]

ENTRIES = {"cpu_lines": 3, "comms": 5, "targets": 7, "context_slots": 512, "ring": 8192}
SPEC = ObjectSpec(SAMPLER_SOURCE, SAMPLER_OBJECT, ("kprofiler_sample",), ENTRIES)
ITERATORS = ObjectSpec(
    PROGRAMS / "iterators.bpf.c", PROGRAMS / "iterators.bpf.o", ("list_programs",), {}
)


def facts(fd):
    with open(f"/proc/self/fdinfo/{fd}") as file:
        results = dict(line.split(":", 1) for line in file)
    names = ("map_type", "key_size", "value_size", "max_entries", "map_flags", "prog_type")
    return {name: results[name].strip() for name in names if name in results}


NAME = SPEC.programs[0]


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def test_both_loaders_create_the_same_maps():
    first, second = LibbpfLoader().load(SPEC), BccLoader().load(SPEC)
    try:
        assert facts(first.program_fd(NAME)) == facts(second.program_fd(NAME)) == {"prog_type": "7"}
        for name in bcc.MAPS:
            assert len(facts(first.map_fd(name))) == 5
            assert facts(first.map_fd(name)) == facts(second.map_fd(name)), name
        with pytest.raises(KeyError):
            second.map_fd("another")
    finally:
        first.close()
        second.close()


def read_tags(loader, spec):
    """Returns each program's tag (the kernel's hash of its instructions), keyed by name."""
    loaded, tags = loader.load(spec), {}
    try:
        for name in spec.programs:
            with open(f"/proc/self/fdinfo/{loaded.program_fd(name)}") as file:
                tags[name] = dict(line.split(":", 1) for line in file)["prog_tag"]
    finally:
        loaded.close()
    return tags


def check_tags(loader, spec):
    together = read_tags(loader, spec)
    assert len(set(together.values())) == 2
    for name in spec.programs:
        assert read_tags(loader, spec._replace(programs=(name,))) == {name: together[name]}


@pytest.mark.skipif(
    read_release(Access())[:2] < (6, 0), reason="the iterator ksym needs kernel 6.0"
)
def test_libbpf_finds_programs_in_an_object_by_name():
    check_tags(LibbpfLoader(), ITERATORS._replace(programs=("list_symbols", "list_programs")))


TWO = """
#include "loaders.bpf.h"
INLINE int is_there(u32 key) { return LOOKUP(roots, &key) ? 1 : 0; }
PROGRAM("perf_event") int first(void *ctx) { return is_there(1); }
PROGRAM("perf_event") int second(void *ctx) { return is_there(2); }
"""


def test_bcc_finds_programs_in_a_source_file_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(bcc, "_TYPES", {"first": 7, "second": 7})
    source, before = tmp_path / "two.bpf.c", descriptors()
    source.write_text(TWO)
    (tmp_path / "loaders.bpf.h").symlink_to(PROGRAMS / "loaders.bpf.h")
    check_tags(BccLoader(), SPEC._replace(source=source, programs=("second", "first")))
    assert descriptors() == before


def test_unrequested_programs_are_not_loaded(tmp_path):
    """The kernel might not support a program's type, such as ``ksym`` before 6.0."""
    unknown = tmp_path / "unknown.bpf.o"
    unknown.write_bytes(ITERATORS.object.read_bytes().replace(b"iter/ksym\0", b"iter/none\0"))
    loaded = LibbpfLoader().load(ITERATORS._replace(object=unknown))
    try:
        assert facts(loaded.program_fd("list_programs"))
        with pytest.raises(KeyError):
            loaded.program_fd("list_symbols")
    finally:
        loaded.close()
    with pytest.raises((OSError, SamplerError), match=r"unknown\.bpf\.o"):
        LibbpfLoader().load(ITERATORS._replace(object=unknown, programs=("list_symbols",)))


def test_a_program_missing_from_the_object_is_an_error():
    with pytest.raises(SamplerError, match=r"finding program none of iterators\.bpf\.o"):
        LibbpfLoader().load(ITERATORS._replace(programs=("list_programs", "none")))


@pytest.mark.long
def test_closing_the_bcc_loader_closes_every_descriptor():
    before = descriptors()
    loaded = BccLoader().load(SPEC)
    assert len(descriptors()) == len(before) + len(bcc.MAPS) + 1
    loaded.close()
    loaded.close()
    assert descriptors() == before


BROKEN = """
int kprofiler_sample(void *ctx) {
    unsigned zero = 0;
    int *value = bpf_map_lookup_elem_(bpf_pseudo_fd(1, KPROFILER_FD_roots), &zero);
    *value = 1;
    return 0;
}
"""


def test_a_rejected_program_raises_an_error_with_the_verifier_log(tmp_path, capfd):
    broken, before = tmp_path / "broken.bpf.c", descriptors()
    broken.write_text(BROKEN)
    with pytest.raises(SamplerError, match=r"loading broken\.bpf\.c failed: Perm") as raised:
        BccLoader().load(SPEC._replace(source=broken))
    assert "invalid mem access 'map_value_or_null'" in raised.value.log
    assert capfd.readouterr() == ("", ""), "nothing past our own output"
    assert descriptors() == before


def test_an_unsupported_map_type_is_reported_as_a_missing_kernel_feature(monkeypatch):
    monkeypatch.setitem(bcc.MAPS, "ring", bcc.MAPS["ring"]._replace(kind=999))
    with pytest.raises(KernelFeatureError, match="Invalid argument"):
        EbpfSampler(SamplerConfig(), loader=BccLoader()).start()


@LIBBPF
def test_periodic_timer_signals_do_not_prevent_bpf_programs_from_loading():
    """The verifier takes longer than the signals' interval, and aborts if a signal is pending."""
    count = 0

    def tick(_number, _frame):
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        sampler = EbpfSampler(SamplerConfig(stacks="user"), loader=LibbpfLoader())
        sampler.start()
        assert sampler.tables is not None  # the program that unwinds using tables is loaded
        sampler.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count


@pytest.mark.parametrize("loader", [LibbpfLoader(), BccLoader()], ids=["libbpf", "bcc"])
@pytest.mark.parametrize("level", [2, *further(1)])
def test_a_verifier_log_too_long_for_its_buffer_is_truncated(loader, level, caplog):
    caplog.set_level("INFO", "otel_kprofiler")
    loader.load(SPEC._replace(log_level=level)).close()
    assert [record.message.partition("\n")[0] for record in caplog.records] == ["verifier log:"]
    assert "processed " in caplog.text[-300:]


@pytest.mark.long
def test_bccs_compiler_is_unloaded_after_use():
    BccLoader().load(SPEC).close()
    before = read_resident_bytes()
    BccLoader().load(SPEC).close()
    with open("/proc/self/maps") as file:
        assert not {"libbcc", "libclang", "libLLVM"} & {
            os.path.basename(line.split()[-1]).partition(".")[0].partition("-")[0] for line in file
        }
    assert read_resident_bytes() - before < 2 << 20
