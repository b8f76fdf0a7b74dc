"""Options of sampling commands determine the sampler's settings for waits and events."""

import pytest

from otel_kprofiler.cli.record import command as record
from otel_kprofiler.cli.sampling_options import Sampling
from otel_kprofiler.host import Access, EventSpec
from otel_kprofiler.sampling import OffCpuConfig
from tests.commands import invoke

OPTIONS = {
    "pids": (), "comms": (), "cgroups": (), "containers": (), "pods": (), "units": (),
    "cpus": (), "stacks": "both", "user_symbols": "names", "python": True, "off_cpu": False,
    "off_cpu_rate": 20, "wakers": False, "loader": "auto", "idle": False,
}  # fmt: skip


def config(child_pid=None, **options):
    sampling, access = Sampling(**OPTIONS | options), Access()
    return sampling.config(access, sampling.find_targets(access), child_pid)


def test_waits_are_sampled_on_request():
    assert config().off_cpu is None
    result = config(off_cpu=True, off_cpu_rate=7, wakers=True)
    assert result.off_cpu == OffCpuConfig(samples_per_second=7, wakers=True, leaves_out="process")
    assert result.on_cpu
    assert not config(off_cpu=True, on_cpu=False).on_cpu


def test_waits_are_sampled_for_the_command_and_its_descendants():
    assert config(4242).child_pid == 4242
    result = config(4242, off_cpu=True)
    results = (result.child_pid, result.target_pids, result.target_descendants)
    assert results == (None, (4242,), True)


def test_selected_events_replace_the_clock_unless_it_is_also_selected():
    faults = EventSpec("page-faults", 0, 999)
    for options, on_cpu, rate in (
        ({"events": ("page-faults",)}, False, 99),
        ({"events": ("page-faults",), "on_cpu": True}, True, 99),
        ({"events": ("page-faults", "cpu-clock")}, True, 99),
        ({"events": ("page-faults", "cpu-clock:freq=7")}, True, 7),
    ):
        result = config(**options)
        results = (result.on_cpu, result.samples_per_second, result.events)
        assert results == (on_cpu, rate, (faults,))
    assert config(rate=50, events=("page-faults",)).events == (EventSpec("page-faults", 0, 50),)
    assert config(rate=50, events=("cpu-clock",)).samples_per_second == 50
    assert config(events=("cs",), period=5).events == (EventSpec("context-switches", 5, 0),)
    assert config(4242, events=("cs",)).target_pids == (4242,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "5"], "-c needs -e EVENT"),
        (["-e", "cs", "-e", "context-switches"], "selected twice"),
        (["-e", "cpu-clock", "--no-on-cpu"], "cannot be used with --no-on-cpu"),
        (["-e", "page-fault"], "did you mean page-faults"),
        (["--wakers"], "--wakers needs --off-cpu"),
        (["--no-on-cpu"], "--no-on-cpu needs --off-cpu"),
    ],
)
def test_contradictory_options_are_rejected(options, message, tmp_path):
    assert message in invoke(record, *options, "-o", tmp_path / "x.otlp", status=2).output
    assert not list(tmp_path.iterdir())
