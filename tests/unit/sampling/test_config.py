"""The sampler's settings are validated, and other values are derived from them."""

from dataclasses import replace

import pytest

from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig
from otel_kprofiler.sampling.ring_size import plan_ring_bytes


@pytest.mark.parametrize(
    "settings",
    [
        {"samples_per_second": 0},
        {"samples_per_second": 10_001},
        {"max_frames": 0},
        {"max_frames": 128},
        {"map_scale_factor": 9},
        {"interrupt_ranges": ((1, 2),) * 5},
    ],
    ids=str,
)
def test_out_of_range_settings_are_rejected(settings):
    with pytest.raises(ValueError, match=r"must be|more than"):
        SamplerConfig(**settings)


def test_the_period_is_the_reciprocal_of_the_rate():
    assert SamplerConfig(samples_per_second=10_000).period_ns == 100_000
    assert SamplerConfig(samples_per_second=1).period_ns == 1_000_000_000


def test_the_ring_buffer_holds_the_samples_from_four_drain_intervals():
    fast = SamplerConfig(samples_per_second=10_000, drain_interval_s=0.5)
    assert plan_ring_bytes(fast, 4) >= 4 * 0.5 * 10_000 * 4 * 8 * 64
    assert plan_ring_bytes(fast, 4) == 4 * plan_ring_bytes(fast, 1)
    pinned = SamplerConfig(samples_per_second=10_000, drain_interval_s=0.5, pin_cpu_ids=(3,))
    assert plan_ring_bytes(pinned, 64) == plan_ring_bytes(fast, 1)


def test_the_ring_size_is_bounded():
    assert plan_ring_bytes(SamplerConfig(), 1) == 256 * 1024
    assert plan_ring_bytes(SamplerConfig(map_scale_factor=3), 1) == 8 * 256 * 1024
    huge = SamplerConfig(samples_per_second=10_000, map_scale_factor=8)
    assert plan_ring_bytes(huge, 512) == 1 << 30
    assert plan_ring_bytes(replace(huge, max_ring_bytes=(8 << 20) - 1), 512) == 4 << 20


class OldKernel:
    """A stand-in for ``Access`` that reports an unsupported kernel."""

    def read_bytes(self, path):
        assert path == "/proc/sys/kernel/osrelease"
        return b"5.4.0-200-generic\n"


@pytest.mark.system
def test_the_error_for_an_unsupported_kernel_names_its_release():
    sampler = EbpfSampler(SamplerConfig(), access=OldKernel())
    with pytest.raises(KernelFeatureError, match=r"5\.4\.0-200-generic") as raised:
        sampler.start()
    assert "5.10" in raised.value.hint
    sampler.close()


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"samples_per_second": -1}, "samples_per_second is -1; it must be between 0 and 10000"),
        (
            {"min_duration_ns": 1 << 32},
            "min_duration_ns is 4294967296; it must be between 0 and 4294967295",
        ),
    ],
)
def test_off_cpu_settings_outside_their_limits_are_rejected(settings, wrong):
    with pytest.raises(ValueError, match=wrong):
        OffCpuConfig(**settings)


def test_a_sampler_configured_to_sample_nothing_is_rejected():
    assert SamplerConfig(on_cpu=False, off_cpu=OffCpuConfig()).off_cpu == OffCpuConfig()
    with pytest.raises(ValueError, match="nothing to sample"):
        SamplerConfig(on_cpu=False)
