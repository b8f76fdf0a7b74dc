"""Samples are omitted only for processes that reliably profile themselves."""

from otel_kprofiler.host import Access
from otel_kprofiler.model import (
    OFF_CPU,
    ON_CPU,
    LossCause,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    StreamTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.processes import SELF_PROFILED, TARGET, leave_out_self_profiled
from otel_kprofiler.processes.self_profiled import profiles_itself

START = 1_750_000_000_000_000_000


def process(tmp_path, *links):
    directory = tmp_path / "proc/7/fd"
    directory.mkdir(parents=True)
    for number, link in enumerate(links):
        (directory / str(number)).symlink_to(link)
    return Access(str(tmp_path))


def test_a_process_with_bpf_maps_is_trusted_to_profile_itself(tmp_path):
    files = process(tmp_path, "/dev/null", "socket:[1]", "anon_inode:bpf-map")
    assert profiles_itself(files, 7, {TARGET: "self"})
    assert not profiles_itself(files, 7, {})


def test_a_process_that_only_claims_to_profile_itself_is_not_trusted(tmp_path):
    files = process(tmp_path, "/dev/null", "anon_inode:[perf_event]")
    assert not profiles_itself(files, 7, {TARGET: "self"})


def group(resource, count):
    times = [START + number for number in range(count)]
    return ResourceSamples(resource, [WindowSample(Stack(()), 1, "a", 0, None, times)])


def test_only_on_cpu_samples_are_omitted_and_the_omitted_samples_are_counted():
    other, own = Resource({"process.pid": 1}), Resource({"process.pid": 2, SELF_PROFILED: True})
    until_now = Resource({"process.pid": 3})
    totals = StreamTotals("s", 100, 200, {LossCause.RING_FULL: 5, LossCause.SELF_PROFILED: 30})
    groups = [group(other, 2), group(own, 3), group(until_now, 4)]
    on_cpu = Profile(ON_CPU, 1, groups, 12, {LossCause.RING_FULL: 1}, totals)
    window = Window(START, START + 10, [on_cpu, Profile(OFF_CPU, 0, groups)])
    window, left = leave_out_self_profiled(window, {until_now})
    on_cpu, off_cpu = window.profiles
    assert left == {"on_cpu": 7}
    assert [resource.resource for resource in on_cpu.resources] == [other]
    assert on_cpu.lost == {LossCause.RING_FULL: 1, LossCause.SELF_PROFILED: 7}
    assert on_cpu.totals.samples == 93
    assert on_cpu.totals.lost == {LossCause.RING_FULL: 5, LossCause.SELF_PROFILED: 37}
    assert off_cpu.resources == groups


def test_a_window_without_self_profiled_processes_is_unchanged():
    window = Window(START, START + 10, [Profile(ON_CPU, 1, [group(Resource({}), 2)])])
    same, left = leave_out_self_profiled(window)
    assert not left
    assert same.profiles[0].lost == {}
    assert same.sample_count == 2
