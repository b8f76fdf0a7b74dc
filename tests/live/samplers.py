"""Runs a sampler, or takes a CPU offline, for the duration of a block."""

import contextlib
from pathlib import Path

import pytest

from otel_kprofiler.sampling import EbpfSampler, SamplerConfig


@contextlib.contextmanager
def sampling(**settings):
    sampler = EbpfSampler(SamplerConfig(**settings))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()


@contextlib.contextmanager
def offline(cpu):
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/online")
    if not path.exists():
        pytest.skip(f"this host cannot take CPU {cpu} offline: no {path}")
    path.write_text("0")
    try:
        yield
    finally:
        path.write_text("1")
