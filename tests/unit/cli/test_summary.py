"""The summary of a recording mentions idle CPUs."""

from dataclasses import replace

from otel_kprofiler.cli.summary import describe_idle_cpus
from otel_kprofiler.model import OFF_CPU, Stack, WindowSample
from tests.windows import make_window


def record(samples, **kwargs):
    """Returns a window of samples that represent 10 ms each."""
    sample = WindowSample(Stack.from_frames(()), 1, "t", 0, None, list(range(samples)))
    window = make_window(0, 1, ({}, [sample]), taken=samples)
    profiles = [replace(profile, period_ns=10_000_000, **kwargs) for profile in window.profiles]
    return replace(window, profiles=profiles)


def test_the_summary_mentions_idle_cpus():
    remark = describe_idle_cpus([record(3), record(1)], cpu_seconds=20.0)
    assert remark.startswith("the CPUs were idle for 99.8% of the time; ")


def test_the_summary_omits_idle_cpus_if_all_cpus_were_busy():
    assert not describe_idle_cpus([record(20)], cpu_seconds=20.0)


def test_the_summary_omits_idle_cpus_if_waits_were_recorded():
    assert not describe_idle_cpus([record(2, kind=OFF_CPU)], cpu_seconds=20.0)


def test_the_summary_omits_idle_cpus_if_only_selected_processes_were_recorded():
    assert not describe_idle_cpus([record(2)], cpu_seconds=0.0)
