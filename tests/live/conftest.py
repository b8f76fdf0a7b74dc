"""Both loaders, and where services write their profiles."""

import sys
from pathlib import Path

import pytest

from otel_kprofiler.bpf import BccLoader, LibbpfLoader, get_loader
from otel_kprofiler.sampling import on_cpu

sys.path.insert(0, str(Path(__file__).parent))

from services import ToFile


@pytest.fixture(params=["libbpf", "bcc"])
def loader(request, monkeypatch):
    """What samplers of the test load their program with, where they are not told."""
    if not {"libbpf": LibbpfLoader, "bcc": BccLoader}[request.param].is_installed():
        pytest.skip(f"{request.param} is not installed (packages libbpf1, python3-bpfcc)")
    monkeypatch.setattr(on_cpu, "get_loader", lambda: get_loader(request.param))
    return request.param


@pytest.fixture
def to_file(tmp_path):
    """Environment of a service that writes its profiles, and the windows that it wrote."""
    return ToFile(tmp_path / "profiles.jsonl")
