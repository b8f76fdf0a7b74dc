"""Runs a sampler for the duration of a test."""

import contextlib

from otel_kprofiler.sampling import EbpfSampler, SamplerConfig


@contextlib.contextmanager
def sampling(**settings):
    sampler = EbpfSampler(SamplerConfig(**settings))
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.close()
