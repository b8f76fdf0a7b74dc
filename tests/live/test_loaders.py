"""The two loaders make the same of one source, and say why they cannot."""

import os

import pytest

from otel_kprofiler.agent.memory import read_resident_bytes
from otel_kprofiler.bpf import (
    SAMPLER_OBJECT,
    SAMPLER_SOURCE,
    BccLoader,
    LibbpfLoader,
    ProgramSpec,
    bcc,
)
from otel_kprofiler.errors import KernelFeatureError, SamplerError
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not BccLoader.is_installed(), reason="python3-bpfcc is not installed"),
]

ENTRIES = {"cpu_lines": 3, "span_slots": 5, "targets": 7, "ring": 8192}
SPEC = ProgramSpec("kprofiler_sample", SAMPLER_SOURCE, SAMPLER_OBJECT, ENTRIES)


def facts(fd):
    """What the kernel knows of a map or a program, except its number and its memory."""
    with open(f"/proc/self/fdinfo/{fd}") as file:
        found = dict(line.split(":", 1) for line in file)
    names = ("map_type", "key_size", "value_size", "max_entries", "map_flags", "prog_type")
    return {name: found[name].strip() for name in names if name in found}


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def test_both_make_the_same_maps():
    first, second = LibbpfLoader().load(SPEC), BccLoader().load(SPEC)
    try:
        assert facts(first.program_fd) == facts(second.program_fd) == {"prog_type": "7"}
        for name in bcc.MAPS:
            assert len(facts(first.map_fd(name))) == 5
            assert facts(first.map_fd(name)) == facts(second.map_fd(name)), name
        with pytest.raises(KeyError):
            second.map_fd("another")
    finally:
        first.close()
        second.close()


def test_closing_bcc_gives_all_descriptors_back():
    before = descriptors()
    loaded = BccLoader().load(SPEC)
    assert len(descriptors()) == len(before) + len(bcc.MAPS) + 1
    loaded.close()
    loaded.close()
    assert descriptors() == before


BROKEN = """
int kprofiler_sample(void *ctx) {
    unsigned zero = 0;
    int *value = bpf_map_lookup_elem_(bpf_pseudo_fd(1, KPROFILER_FD_span_slots), &zero);
    *value = 1;
    return 0;
}
"""


def test_a_program_that_the_verifier_rejects_is_an_error_with_its_log(tmp_path, capfd):
    broken, before = tmp_path / "broken.bpf.c", descriptors()
    broken.write_text(BROKEN)
    with pytest.raises(SamplerError, match=r"loading broken\.bpf\.c failed: Perm") as raised:
        BccLoader().load(SPEC._replace(source=broken))
    assert "invalid mem access 'map_value_or_null'" in raised.value.log
    assert capfd.readouterr() == ("", ""), "nothing past our own output"
    assert descriptors() == before


def test_a_map_that_the_kernel_does_not_know_is_a_missing_feature(monkeypatch):
    """As on a kernel without BPF ring buffers."""
    monkeypatch.setitem(bcc.MAPS, "ring", bcc.MAPS["ring"]._replace(kind=999))
    with pytest.raises(KernelFeatureError, match="Invalid argument"):
        EbpfSampler(SamplerConfig(), loader=BccLoader()).start()


@pytest.mark.parametrize("loader", [LibbpfLoader(), BccLoader()], ids=["libbpf", "bcc"])
@pytest.mark.parametrize("level", [1, 2])
def test_the_verifiers_log_is_written_as_far_as_there_is_room(loader, level, caplog):
    """Of level 2 there is more than the kernel gives; the program is loaded all the same."""
    caplog.set_level("INFO", "otel_kprofiler")
    loader.load(SPEC._replace(log_level=level)).close()
    assert [record.message.partition("\n")[0] for record in caplog.records] == ["verifier log:"]
    assert "processed " in caplog.text[-300:]


def test_nothing_of_the_compiler_stays_in_memory():
    BccLoader().load(SPEC).close()
    before = read_resident_bytes()
    BccLoader().load(SPEC).close()
    with open("/proc/self/maps") as file:
        assert not {"libbcc", "libclang", "libLLVM"} & {
            os.path.basename(line.split()[-1]).partition(".")[0].partition("-")[0] for line in file
        }
    assert read_resident_bytes() - before < 2 << 20
