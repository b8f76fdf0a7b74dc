"""A plan contains the sampler settings for a service."""

import os
from dataclasses import replace

import pytest

from otel_kprofiler.errors import ConfigError, HostError
from otel_kprofiler.host import parse_event
from otel_kprofiler.pipeline import WindowSchedule
from otel_kprofiler.sampling import SamplerConfig
from otel_kprofiler.sdk import KernelProfiler
from otel_kprofiler.sdk.plan import Plan, complete_sampler_config
from otel_kprofiler.sdk.schema import make_plan, read_settings


def interval_s(target, rate, monkeypatch, cpus):
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    plan = Plan(
        target=target,
        sampler=SamplerConfig(samples_per_second=rate),
        schedule=WindowSchedule(5_000_000_000),
    )
    return complete_sampler_config(plan).drain_interval_s


@pytest.mark.parametrize(("rate", "expected"), [(19, 1.0), (99, 1.0), (999, 0.1), (9999, 0.02)])
def test_the_drain_interval_for_a_single_process_ignores_the_cpu_count(rate, expected, monkeypatch):
    for cpus in (2, 256):
        assert interval_s("self", rate, monkeypatch, cpus) == pytest.approx(expected, rel=0.01)


def test_a_system_wide_sampler_is_drained_more_often_on_larger_hosts(monkeypatch):
    assert interval_s("children", 99, monkeypatch, 64) < interval_s("children", 99, monkeypatch, 4)


def test_a_service_cannot_sample_locks_in_its_own_process():
    """A service can sample the locks of its children."""
    sampler = SamplerConfig(events=(parse_event("lock-contention", 99),))
    plan = Plan(target="self", sampler=sampler, schedule=WindowSchedule(5_000_000_000))
    with pytest.raises(HostError, match="lock-contention in its own process"):
        complete_sampler_config(plan)
    assert complete_sampler_config(replace(plan, target="children")).events == sampler.events


def test_the_profilers_defaults_match_the_configuration_schema():
    """The defaults are available without importing the schema."""
    assert KernelProfiler()._plan == make_plan(read_settings({}))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RESOURCES", "container"), ("SELF_PROFILED", "mark"), ("TARGET_CONTAINERS", "3f2a3f2a3f2a")],
)
def test_keys_that_have_no_effect_in_a_service_are_rejected(variable, value):
    with pytest.raises(ConfigError, match="applies only to the agent"):
        make_plan(read_settings({f"OTEL_KPROFILER_{variable}": value}))


def test_waits_are_sampled_only_if_off_cpu_is_enabled():
    assert KernelProfiler()._plan.sampler.off_cpu is None
    assert KernelProfiler(off_cpu=True)._plan == make_plan(
        read_settings({"OTEL_KPROFILER_OFF_CPU": "true"})
    )
