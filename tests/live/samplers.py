"""Runs samplers."""

import contextlib

from otel_kprofiler.sampling import EbpfSampler, SamplerConfig


@contextlib.contextmanager
def sampling(**settings):
    """Yields a running sampler with these fields of its configuration."""
    sampler = EbpfSampler(SamplerConfig(**settings))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()
