"""Each opentelemetry-ebpf-profiler receiver key is supported, or rejected with a reason.

The keys come from ``collector/config/config_linux.go`` as of August 2026.
"""

import pytest

from otel_kprofiler.errors import ConfigError
from tests.unit.config.minimal import load_agent

# For each key: the value in the file, and the value passed to the component.
HONOURED = {
    "reporter_interval": ("7s", lambda c: c.schedule.interval_ns, 7_000_000_000),
    "reporter_jitter": ("0.5", lambda c: c.schedule.jitter, 0.5),
    "samples_per_second": ("97", lambda c: c.sampler.samples_per_second, 97),
    "send_idle_frames": ("true", lambda c: c.sampler.send_idle_frames, True),
    "filter_min_process_age": ("2s", lambda c: c.sampler.min_process_age_ns, 2 * 10**9),
    "map_scale_factor": ("3", lambda c: c.sampler.map_scale_factor, 3),
    "bpf_verifier_log_level": ("2", lambda c: c.sampler.verifier_log_level, 2),
    "no_kernel_version_check": ("true", lambda c: c.sampler.check_kernel, False),
    "pin_cpu_ids": ('"0-1,3"', lambda c: c.sampler.pin_cpu_ids, (0, 1, 3)),
    "monitor_interval": ("9s", lambda c: c.monitor_interval_s, 9),
    "clock_sync_interval": ("1m30s", lambda c: c.clock_sync_interval_s, 90),
    "probabilistic_interval": ("2m", lambda c: c.sampling_interval_s, 120),
    "probabilistic_threshold": ("30", lambda c: c.sampling_percent, 30),
    "verbose_mode": ("true", lambda c: c.log_level, "debug"),
    "error_mode": ("ignore", lambda c: c.must_sample, False),
}
REFUSED = {
    "frame_cache_size": "32768",
    "interpreters": "{python: {enabled: true}, ruby: {enabled: false}}",
    "send_error_frames": "true",
    "off_cpu_threshold": "0.01",
    "include_env_vars": "HOME,PATH",
    "max_grpc_retries": "5",
    "max_rpc_msg_size": "33554432",
    "bpf_fs_root": "/sys/fs/bpf/",
    "obi_process_ctx": "false",
    "pid_namespace_translation": "false",
    "probes": "[{type: kprobe, symbol: vfs_open}]",
}


def load(values):
    return load_agent("\n".join(f"{key}: {value}" for key, value in values.items()))


@pytest.mark.parametrize("key", HONOURED)
def test_supported_keys_take_effect(key):
    value, read, expected = HONOURED[key]
    assert read(load({key: value})) == expected
    assert read(load({"stacks": "kernel"})) != expected, "the test would pass without the key"


def test_defaults_at_the_edge_of_the_valid_range_are_accepted():
    assert load({
        "probabilistic_threshold": "100", "filter_min_process_age": "0", "map_scale_factor": "0",
        "bpf_verifier_log_level": "0", "error_mode": "PROPAGATE", "pin_cpu_ids": '""',
    }).must_sample  # fmt: skip


def test_all_unsupported_keys_are_reported_at_once_with_reasons():
    everything = {key: value for key, (value, *_) in HONOURED.items()} | REFUSED
    with pytest.raises(ConfigError) as caught:
        load(everything)
    refused = {problem.key.rpartition(".")[2]: problem for problem in caught.value.problems}
    assert sorted(refused) == sorted(REFUSED)
    for problem in refused.values():
        reason = problem.message.removeprefix("not available: ")
        assert reason != problem.message
        assert len(reason) > 15
        assert problem.line
