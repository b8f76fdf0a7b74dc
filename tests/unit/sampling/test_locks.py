"""The plan for sampling lock contention depends on the kernel and the settings."""

import struct

import pytest

from otel_kprofiler.errors import KernelFeatureError
from otel_kprofiler.host import parse_event
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.sampling.locks import lock_map_entries, plan_locks
from tests.raising import raising
from tests.unit.bpf.test_locks import make_types


def plan(types, *texts):
    config = SamplerConfig(events=tuple(parse_event(text, 99) for text in texts))
    return plan_locks(config, lambda: types)


def test_lock_events_are_numbered_and_collect_the_same_stacks_as_cpu_clock_samples():
    planned = plan(make_types("contention_begin", "contention_end"), "faults", "lock-contention")
    assert (planned.number, planned.spec.rate) == (2, 99)
    for program, by in (
        ("kprofiler_sample", (0, 0)),
        ("kprofiler_unwind", (1, 0)),
        ("kprofiler_unwind_5_10_python", (2, 1)),
    ):
        (packed,) = planned.constants(program).values()
        assert struct.unpack("=10Q", packed)[:3] == (2, *by)


def test_lock_maps_have_the_minimum_size_if_lock_contention_is_not_sampled():
    unread = raising(AssertionError("the kernel's types must not be read"))
    assert plan_locks(SamplerConfig(), unread) is None
    assert lock_map_entries(None, 64) == {"lock_buckets": 1, "lock_lines": 1}


def test_the_error_for_a_kernel_without_lock_tracepoints_states_the_reason():
    with pytest.raises(KernelFeatureError, match="contention_begin") as raised:
        plan(make_types(), "lock-contention")
    assert "5.19" in raised.value.hint
