"""Runs a sampler for the duration of a test."""

import contextlib

from otel_kprofiler.sampling import EbpfSampler, SamplerConfig


@contextlib.contextmanager
def sampling(**settings):
    """Runs a sampler with these configuration fields during the block."""
    sampler = EbpfSampler(SamplerConfig(**settings))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()
