"""Fixtures: both loaders, and a file for profiles of services."""

import sys
from pathlib import Path

import pytest

from otel_kprofiler.bpf import BccLoader, LibbpfLoader, get_loader
from otel_kprofiler.sampling import on_cpu

sys.path.insert(0, str(Path(__file__).parent))

from services import ToFile


@pytest.fixture(params=["libbpf", "bcc"])
def loader(request, monkeypatch):
    """The loader that samplers use by default."""
    if not {"libbpf": LibbpfLoader, "bcc": BccLoader}[request.param].is_installed():
        pytest.skip(f"{request.param} is not installed (packages libbpf1, python3-bpfcc)")
    monkeypatch.setattr(on_cpu, "get_loader", lambda: get_loader(request.param))
    return request.param


@pytest.fixture
def to_file(tmp_path):
    """Environment of a service that writes its profiles to a file, and the windows in it."""
    return ToFile(tmp_path / "profiles.jsonl")
