"""A coarse Resource granularity merges processes without changing or losing samples."""

from collections import Counter
from dataclasses import replace

import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
)

from benchmarks.bench_grain import CONTAINERS, EXECUTABLES, PROCESSES, SERVICES, make_windows
from benchmarks.bench_otlp import HOST
from otel_kprofiler.model import OFF_CPU, Profile, Stack, WaitTotals, WindowSample
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window
from otel_kprofiler.processes import Grain, merge_resources
from tests import strict_receiver
from tests.further import further_of
from tests.windows import make_window, timed_values

START = 1_750_000_000_000_000_000
PATH = "process.executable.path"
NAME = "process.executable.name"


@pytest.fixture(scope="module")
def of_processes():
    (window,) = make_windows(1)
    (on_cpu,) = window.profiles

    def valued(sample):
        return sample._replace(values=[7 * sample.cpu + 3] * len(sample.timestamps_unix_ns))

    waits = [
        group._replace(samples=list(map(valued, group.samples))) for group in on_cpu.resources[::3]
    ]
    return replace(window, profiles=[on_cpu, Profile(OFF_CPU, 0, waits)])


def count_samples(window):
    """Counts samples by all their properties except the Resource."""
    counts = Counter()
    for profile in window.profiles:
        for _, sample in profile.samples:
            stack = tuple((frame.address, frame.function) for frame in sample.stack.frames)
            thread = (sample.tid, sample.thread_name, sample.cpu)
            for time, value in timed_values(sample):
                counts[profile.kind.name, stack, thread, time, value] += 1
    return counts


@pytest.fixture(scope="module")
def samples_of_processes(of_processes):
    return count_samples(of_processes)


def labels_of(payload):
    """Returns Pyroscope's identifying labels for each profile in a request."""
    return list(strict_receiver.labels_of(ExportProfilesServiceRequest.FromString(payload)))


RESOURCES = {
    Grain.PROCESS: PROCESSES,
    Grain.EXECUTABLE: EXECUTABLES,
    Grain.CONTAINER: CONTAINERS - 1,  # one process in ten is not in a container
    Grain.SERVICE: SERVICES,
    Grain.HOST: 1,
}
MANY_REQUESTS = 60_000


@pytest.mark.system
@pytest.mark.parametrize(
    ("grain", "max_bytes"),
    further_of(
        [(grain, max_bytes) for grain in Grain for max_bytes in (None, MANY_REQUESTS)],
        [
            *((grain, None) for grain in Grain),
            (Grain.PROCESS, MANY_REQUESTS),
            (Grain.HOST, MANY_REQUESTS),
        ],
    ),
)
def test_merging_500_processes_loses_no_samples_and_yields_distinct_labels(
    of_processes, samples_of_processes, grain, max_bytes
):
    merged = merge_resources(of_processes, grain, HOST.keys())
    assert count_samples(merged) == samples_of_processes
    assert len(merged.profiles[0].resources) == RESOURCES[grain]
    encoded = encode_window(merged, max_bytes=max_bytes)
    assert not encoded.too_large
    assert len(encoded.batches) > 1 if max_bytes else len(encoded.batches) == 1
    sent = Counter()
    for batch in encoded.batches:
        labels = labels_of(batch.payload)
        assert len(set(labels)) == len(labels)
        assert not list(check_payload(batch.payload))
        for window in decode_windows(batch.payload):
            sent.update(count_samples(window))
    assert sent == samples_of_processes


PROCESS = {
    "host.name": "box",
    "cluster": "blue",
    "process.pid": 7,
    "process.creation.time": "2025-06-15T15:06:40.123Z",
    NAME: "server",
    PATH: "/usr/bin/server",
    "process.runtime.name": "cpython",
    "container.id": "3f2a",
    "k8s.pod.uid": "77",
    "systemd.unit.name": "containerd.service",
    "process.parent_pid": 1,
    "service.name": "shop",
    "service.version": "2",
    "service.instance.id": "11",
}
COMMON = ("host.name", "cluster")
OF_CONTAINER = {
    *(*COMMON, "container.id", "k8s.pod.uid", "systemd.unit.name"),
    *("service.name", "service.version"),
}


@pytest.mark.parametrize(
    ("grain", "kept"),
    [
        (Grain.PROCESS, {*PROCESS}),
        (Grain.EXECUTABLE, {*OF_CONTAINER, NAME, PATH}),
        (Grain.CONTAINER, OF_CONTAINER),
        (Grain.SERVICE, {*COMMON, "service.name", "service.version"}),
        (Grain.HOST, {*COMMON}),
    ],
)
def test_each_grouping_keeps_only_its_subset_of_the_resource_attributes(grain, kept):
    assert grain.select(PROCESS, COMMON) == {key: PROCESS[key] for key in kept}


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({NAME: "kworker/0:1H"}, "kworker"),
        ({NAME: "ksoftirqd/1"}, "ksoftirqd"),
        ({NAME: "kswapd0"}, "kswapd0"),
        ({NAME: "a:b", PATH: "/opt/a:b"}, "a:b"),
    ],
)
def test_numbered_kernel_threads_are_merged_into_one_executable(attributes, name):
    assert Grain.EXECUTABLE.select(attributes, ())[NAME] == name


def test_merged_kernel_threads_keep_the_kernel_thread_attribute():
    thread = {NAME: "kworker/0:1H", "otel_kprofiler.kernel_thread": "kworker"}
    assert Grain.EXECUTABLE.select(thread, ()) == {**thread, NAME: "kworker"}


def test_values_that_python_considers_equal_stay_distinct():
    samples = [WindowSample(Stack(()), 1, "a", 0, None, [START])]
    groups = (({"host.name": value}, samples) for value in (1, True, 1.0, "1", 1))
    window = make_window(START, START + 10, *groups)
    (profile,) = merge_resources(window, Grain.HOST, ["host.name"]).profiles
    values = [group.resource.attributes["host.name"] for group in profile.resources]
    assert [repr(value) for value in values] == ["1", "True", "1.0", "'1'"]
    assert profile.sample_count == 5


def test_a_process_has_the_same_resource_in_every_profile(of_processes):
    on_cpu, off_cpu = merge_resources(of_processes, Grain.HOST, HOST.keys()).profiles
    assert on_cpu.resources[0].resource is off_cpu.resources[0].resource


def test_exact_off_cpu_times_of_merged_processes_are_summed():
    waits = WaitTotals((1, 20, 0, 0, 0), 3, 1)
    groups = (
        ({"process.pid": pid, "host.name": "h"}, [], totals)
        for pid, totals in ((1, waits), (2, None), (3, waits))
    )
    window = make_window(START, START + 9, *groups, kind=OFF_CPU)
    (profile,) = merge_resources(window, Grain.HOST, ["host.name"]).profiles
    assert [group.waits for group in profile.resources] == [waits.plus(waits)]


def test_merging_resources_by_process_leaves_windows_unchanged(of_processes):
    assert merge_resources(of_processes, Grain.PROCESS, ()) is of_processes
