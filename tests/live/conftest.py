"""Fixtures: the BPF loaders, and a file to which services write their profiles."""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from otel_kprofiler.bpf import BccLoader, LibbpfLoader, bcc, get_loader
from otel_kprofiler.host import Access, find_cgroup_root
from otel_kprofiler.sampling import on_cpu
from otel_kprofiler.symbols import KernelSymbolizer

sys.path.insert(0, str(Path(__file__).parent))

from services import ToFile

from tests.further import further
from tests.public import get_public_python
from tests.strict_receiver import StrictReceiver
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def compile_once():
    """Returns bcc's compiler, with results cached by source, programs and descriptors."""
    compiled, compile_now = {}, bcc.compile_programs

    def compile_programs(spec, maps):
        key = (spec.source.read_bytes(), spec.programs, tuple(maps.items()))
        if key not in compiled:
            compiled[key] = compile_now(spec, maps)
        return compiled[key]

    return compile_programs


@pytest.fixture(params=["libbpf", *further("bcc")])
def loader(request, monkeypatch, compile_once):
    """Sets the samplers' default loader. Tests that use this fixture run once with each loader."""
    monkeypatch.setattr(bcc, "compile_programs", compile_once)
    if not {"libbpf": LibbpfLoader, "bcc": BccLoader}[request.param].is_installed():
        pytest.skip(f"{request.param} is not installed (packages libbpf1, python3-bpfcc)")
    monkeypatch.setattr(on_cpu, "get_loader", lambda: get_loader(request.param))
    return request.param


@pytest.fixture(scope="session")
def public_python():
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become another user")
    return get_public_python()


@pytest.fixture
def no_low_descriptors():
    """Occupies all descriptors that select(2) supports."""
    soft, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    with contextlib.ExitStack() as taken:
        while taken.enter_context(open(os.devnull)).fileno() < 1023:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.fixture
def to_file(tmp_path):
    """Returns a profiles file, and the environment variables that make a service write to it."""
    return ToFile(tmp_path / "profiles.jsonl")


@pytest.fixture
def receiver():
    """Starts a receiver that accepts only profiles that conform to all rules."""
    receiver = StrictReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def symbolizer():
    """Returns the running kernel's symbols; skips the test if the symbols are hidden."""
    result = KernelSymbolizer.live(Access())
    if result.hidden:
        pytest.skip(f"{result.hidden.value}; fix: {result.hidden.fix}")
    return result


@pytest.fixture
def cgroup():
    """Creates a cgroup; kills the processes in it and in its children at the end of the test."""
    root = find_cgroup_root(Access())
    if root is None or os.geteuid() != 0:
        pytest.skip("needs root and a cgroup v2 hierarchy")
    path = Path(root.path) / f"kprofiler-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a cgroup: {error}")
    yield path
    for directory in [*path.iterdir(), path]:
        if directory.is_dir():
            for pid in (directory / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            wait_until(lambda place=directory: not (place / "cgroup.procs").read_text())
            directory.rmdir()
