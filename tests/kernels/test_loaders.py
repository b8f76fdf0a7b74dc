"""The sampler works with the second loader, bcc, on this kernel."""

import pytest
from guest.sampled import drain_for, finish

from otel_kprofiler.bpf import BccLoader
from otel_kprofiler.model import KERNEL_SIDE
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig

pytestmark = pytest.mark.kernel


@pytest.mark.one_boot
def test_the_sampler_compiled_by_bcc_accounts_for_every_sample():
    """The sampler compiled by bcc loads and accounts for every sample."""
    if not BccLoader.is_installed():
        pytest.skip("python3-bpfcc is not installed")
    config = SamplerConfig(samples_per_second=199, stacks="both", send_idle_frames=True)
    sampler = EbpfSampler(config, loader=BccLoader())
    sampler.start()
    try:
        samples = drain_for(sampler, 1)
        samples += finish(sampler)
    finally:
        sampler.close()
    assert any(sample.words(KERNEL_SIDE) for sample in samples)
