"""Runs a sampler or a load, or takes a CPU offline, for the duration of a block."""

import contextlib
import subprocess
import sys
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
def load(code, *, cpu=None):
    """Runs Python code in a process, on one CPU if given; yields its pid."""
    pin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\n" if cpu is not None else ""
    process = subprocess.Popen([sys.executable, "-S", "-c", pin + code])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


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
