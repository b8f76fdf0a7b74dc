"""Tests the choice of a loader, and compilation by bcc in a separate process."""

import logging
import os
import shutil
import subprocess
import sys

import pytest

from otel_kprofiler.bpf import (
    SAMPLER_OBJECT,
    SAMPLER_SOURCE,
    BccLoader,
    LibbpfLoader,
    ObjectSpec,
    bcc,
    bcc_compile,
    get_loader,
)
from otel_kprofiler.bpf import loader as loading
from otel_kprofiler.errors import DependencyError, HostError, SamplerError
from tests.further import further

pytestmark = pytest.mark.system

SPEC = ObjectSpec(SAMPLER_SOURCE, SAMPLER_OBJECT, ("kprofiler_sample",), {})

needs_bcc = pytest.mark.skipif(
    not BccLoader.is_installed(), reason="python3-bpfcc is not installed"
)


@pytest.mark.parametrize(
    ("name", "libbpf", "has_bcc", "chosen"),
    [
        ("auto", True, True, "libbpf"),
        ("auto", False, True, "bcc"),
        ("libbpf", False, True, "libbpf"),
        ("bcc", True, False, "bcc"),
    ],
)
def test_the_loader_auto_prefers_libbpf_and_an_explicit_loader_has_no_fallback(
    monkeypatch, name, libbpf, has_bcc, chosen
):
    monkeypatch.setattr(LibbpfLoader, "is_installed", lambda: libbpf)
    monkeypatch.setattr(BccLoader, "is_installed", lambda: has_bcc)
    assert get_loader(name).name == chosen


@pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf is not installed")
def test_an_object_file_that_an_upgrade_has_replaced_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "sampler.bpf.o"
    shutil.copy2(SAMPLER_OBJECT, path)
    monkeypatch.setattr(loading, "_OBJECTS", {path: loading._OBJECTS[SAMPLER_OBJECT]})
    loading.check_object(path)
    path.write_bytes(b"another version")
    with pytest.raises(HostError, match="was replaced") as refused:
        LibbpfLoader().load(SPEC._replace(object=path))
    assert "restart" in refused.value.hint


def test_the_error_for_a_missing_bpf_library_names_the_packages(monkeypatch):
    for loader in (LibbpfLoader, BccLoader):
        monkeypatch.setattr(loader, "is_installed", lambda: False)
    with pytest.raises(DependencyError) as raised:
        get_loader()
    assert "apt-get install libbpf1" in raised.value.hint
    assert "python3-bpfcc" in raised.value.hint


def test_an_unknown_loader_is_rejected():
    with pytest.raises(ValueError, match="unknown loader 'bpftool'; use one of auto, libbpf, bcc"):
        get_loader("bpftool")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Replaces the bcc package, and returns a function that writes the replacement's code."""
    monkeypatch.setattr(bcc, "_PACKAGE", str(tmp_path / "bcc"))
    monkeypatch.setattr(bcc, "_PYTHON", sys.executable)

    def make(code):
        (tmp_path / "bcc").mkdir()
        (tmp_path / "bcc" / "__init__.py").write_text(code)

    return make


def test_the_error_for_a_missing_bcc_names_its_package(package):
    with pytest.raises(DependencyError, match=r"there is no .*/bcc") as raised:
        BccLoader().load(SPEC)
    assert "apt-get install python3-bpfcc" in raised.value.hint


def test_bcc_without_its_shared_library_counts_as_missing(package):
    package("import ctypes\nctypes.CDLL('libbcc.so.99')")
    with pytest.raises(DependencyError, match=r"libbcc\.so\.99: cannot open"):
        bcc.compile_programs(SPEC, {})


def test_bcc_rejects_programs_that_only_libbpf_can_load():
    with pytest.raises(
        DependencyError, match=r"another in sampler\.bpf\.c cannot be loaded with bcc"
    ):
        BccLoader().load(SPEC._replace(programs=("kprofiler_sample", "another")))


BCC_THAT_TELLS = """
import os, sys
from bcc import beside

class BPF:
    def __init__(self, text, cflags):
        self.said = (sorted(os.environ), sys.path, cflags, len(text), beside.__name__)

    def dump_func(self, name):
        return repr((name, *self.said)).encode()
"""


def test_the_compiler_runs_in_a_minimal_environment(package, tmp_path, monkeypatch):
    monkeypatch.setenv("ARCH", "mips")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    before = dict(os.environ)
    package(BCC_THAT_TELLS)
    (tmp_path / "bcc" / "beside.py").write_text("")
    (code,) = bcc.compile_programs(SPEC, {"ring": 7}).values()
    name, variables, path, flags, size, beside = eval(code)
    assert name == b"kprofiler_sample"
    assert set(variables) <= {"BCC_KERNEL_SOURCE", "LC_CTYPE"}, "Python sets the second itself"
    assert not any("-packages" in entry or str(tmp_path) in entry for entry in path)
    assert flags == (*bcc._FLAGS, f"-I{SAMPLER_SOURCE.parent}", "-DKPROFILER_FD_ring=7")
    assert size == SAMPLER_SOURCE.stat().st_size
    assert beside == "bcc.beside"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("code", "log"),
    [
        ("class BPF:\n def __init__(self, text, cflags): raise Exception('no way')", "no way"),
        ("class BPF:\n def __init__(self, text, cflags): __import__('os').abort()", ""),
        ("import os; os._exit(0)", ""),
    ],
    ids=["refused", "crashed", "silent"],
)
def test_a_compiler_failure_is_reported_as_an_error(package, code, log):
    package(code)
    with pytest.raises(SamplerError, match=r"compiling sampler\.bpf\.c with bcc failed") as raised:
        bcc.compile_programs(SPEC, {})
    assert raised.value.log == log


def test_a_hanging_compiler_is_killed(package, monkeypatch):
    package("import time; time.sleep(60)")
    monkeypatch.setattr(bcc, "_COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(SamplerError, match="timed out"):
        bcc.compile_programs(SPEC, {})


MAPS = dict.fromkeys(bcc.MAPS, 3)


@needs_bcc
def test_the_error_contains_the_compilers_diagnostics(tmp_path):
    broken = tmp_path / "broken.bpf.c"
    broken.write_text("int kprofiler_sample(void *ctx) { return unheard_of; }")
    with pytest.raises(SamplerError, match=r"compiling broken\.bpf\.c") as raised:
        bcc.compile_programs(SPEC._replace(source=broken), MAPS)
    assert "error: use of undeclared identifier 'unheard_of'" in raised.value.log


TWO = """
#include "shared.h"
int first(void *ctx) { return FIRST; }
int second(void *ctx) { u64 twice = 2 * FIRST; return twice + (long)ctx; }
"""


@needs_bcc
def test_all_programs_in_a_source_file_are_compiled_with_headers_from_its_directory(tmp_path):
    source = tmp_path / "two.bpf.c"
    source.write_text(TWO)
    (tmp_path / "shared.h").write_text('#include "loaders.bpf.h"\n#define FIRST 1\n')
    (tmp_path / "loaders.bpf.h").symlink_to(SAMPLER_SOURCE.with_name("loaders.bpf.h"))
    spec = SPEC._replace(source=source, programs=("second", "first"))
    codes = bcc.compile_programs(spec, MAPS)
    assert list(codes) == ["second", "first"]
    return_one = bytes.fromhex("b700000001000000 9500000000000000")
    assert codes["first"] == return_one
    assert codes["second"] != return_one
    with pytest.raises(SamplerError, match=r"compiling two\.bpf\.c"):
        bcc.compile_programs(spec._replace(programs=("first", "third")), MAPS)


@needs_bcc
def test_the_sampler_compiles_without_warnings(caplog):
    caplog.set_level(logging.DEBUG, "otel_kprofiler")
    assert len(bcc.compile_programs(SPEC, MAPS)["kprofiler_sample"]) % 8 == 0
    assert not caplog.records


@needs_bcc
@pytest.mark.parametrize("architecture", ["arm64", *further("x86_64")])
def test_the_stub_headers_work_on_each_architecture(architecture):
    """bcc reads the target architecture from the variable ARCH."""
    flags = [
        *bcc._FLAGS,
        f"-I{SAMPLER_SOURCE.parent}",
        *(f"-DKPROFILER_FD_{name}=3" for name in MAPS),
    ]
    done = subprocess.run(
        [bcc._PYTHON, "-ISB", bcc_compile.__file__, bcc._PACKAGE, *SPEC.programs, *flags],
        env={"BCC_KERNEL_SOURCE": str(bcc._STUBS), "ARCH": architecture},
        input=SAMPLER_SOURCE.read_bytes(), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout) > 1000
