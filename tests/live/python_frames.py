"""Samples the threads of this process while they run given functions, and decodes the frames."""

import contextlib
import os
import time

from samplers import started

from otel_kprofiler.interpreters import open_own
from otel_kprofiler.model import PYTHON_SIDE, parse_python_stack
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

_OWN = open_own()
LAYOUT = _OWN.interpreter.layout
PROCESS = _OWN.process._replace(image_tag=7)


@contextlib.contextmanager
def sampling(*, pid=None, register=True, codes=None, **settings):
    """Samples ``pid``; by default, samples this process and registers it for Python frames."""
    register = register and pid is None
    config = {"samples_per_second": 999, "target_pids": (pid or os.getpid(),), **settings}
    with started(EbpfSampler(SamplerConfig(**config), python_codes=codes)) as sampler:
        if register:
            assert sampler.python.register(os.getpid(), LAYOUT, PROCESS)
        yield sampler


def take(sampler, work, *args, seconds=0.5, least=100):
    """Calls ``work`` repeatedly, and returns samples from this thread and from other threads."""
    samples, end = [], time.monotonic() + seconds
    while time.monotonic() < end or (len(samples) < least and time.monotonic() < end + 60):
        work(*args)
        samples += sampler.drain()
    assert len(samples) >= least, sampler.counts()
    return samples


def frames(sampler, sample):
    """Returns (function, instruction, whether called from C) for each frame, leaf first."""
    named = []
    for frame in parse_python_stack(sample.words(PYTHON_SIDE)).frames:
        code = sampler.python_codes.get(frame.code)
        named.append((code and code.function, frame.instruction, frame.is_from_c))
    return named


def stacks(sampler, samples):
    return [frames(sampler, sample) for sample in samples if sample.words(PYTHON_SIDE)]


def functions(found):
    return tuple(name for name, _, _ in found)
