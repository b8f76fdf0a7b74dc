"""Wait samples, process totals and the threshold survive a round trip."""

import pytest

from otel_kprofiler.model import (
    KERNEL_SIDE,
    NO_WAITS,
    OFF_CPU,
    ON_CPU,
    Form,
    Frame,
    Line,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    WaitCause,
    WaitState,
    WaitTotals,
    Window,
    WindowSample,
    WindowWait,
    WindowWaker,
)
from otel_kprofiler.otlp import check_payload, decode_windows, encode_window

START = 1_750_000_000_000_000_000
READ = Stack.from_frames([Frame(None, 0xFFFFFFFF81000010, (Line("vfs_read"),), 0, KERNEL_SIDE)])
WAITS = [
    None,
    WindowWait(WaitState.RUNNABLE, WaitCause.RUN_QUEUE),
    WindowWait(WaitState.INTERRUPTIBLE, WaitCause.PIPE),
    WindowWait(WaitState.INTERRUPTIBLE, None),
    WindowWait(WaitState.INTERRUPTIBLE, WaitCause.PIPE, is_ended=False),
    WindowWait(WaitState.UNINTERRUPTIBLE, WaitCause.DISK, True, WindowWaker(0, 0, "swapper/1")),
    WindowWait(WaitState.UNINTERRUPTIBLE, WaitCause.DISK, True, WindowWaker(7, 8, "\x1bname")),
]
TOTALS = WaitTotals((5, 4_000_000_000, 0, 0, 1), 17, 3)


def resource(pid):
    return Resource({"process.pid": pid})


def window(*groups, threshold_ns=1_500_000, others=()):
    profile = Profile(OFF_CPU, 0, groups, taken=len(WAITS), threshold_ns=threshold_ns)
    return Window(START, START + 1000, [*others, profile])


def sample(wait, number=0, values=(700,)):
    times = [START + number + at for at in range(len(values))]
    return WindowSample(READ, 7, "cat", 0, None, times, values, (), wait)


def received(window, **options):
    batches = encode_window(window, **options).batches
    assert [check_payload(batch.payload) for batch in batches] == [[]] * len(batches)
    return batches, decode_windows([batch.payload for batch in batches])


@pytest.mark.parametrize("form", Form)
def test_wait_details_survive_a_round_trip(form):
    samples = [sample(wait, number) for number, wait in enumerate(WAITS)]
    _, (result,) = received(window(ResourceSamples(resource(7), samples)), form=form)
    assert [one.wait for _, one in result.samples] == WAITS
    assert [one.labels for _, one in result.samples] == [()] * len(WAITS)


def test_wait_causes_introduced_by_later_versions_are_decoded_as_other():
    (batch,) = encode_window(window(ResourceSamples(resource(7), [sample(WAITS[2])]))).batches
    ((_, result),) = decode_windows(batch.payload.replace(b"\x04pipe", b"\x04tape"))[0].samples
    assert result.wait == WindowWait(WaitState.INTERRUPTIBLE, WaitCause.OTHER)


@pytest.mark.parametrize("form", Form)
def test_wait_totals_survive_a_round_trip_even_for_processes_without_samples(form):
    on_cpu = WindowSample(READ, 7, "cat", 0, None, [START])
    quiet = TOTALS._replace(switches=0, below_ns=0)
    groups = [
        ResourceSamples(resource(7), [sample(WAITS[2])], TOTALS),
        ResourceSamples(resource(8), [], quiet),
        ResourceSamples(resource(9), [sample(WAITS[2])]),
    ]
    beside = Profile(ON_CPU, 10_000_000, [ResourceSamples(resource(7), [on_cpu])])
    (batch,), (result,) = received(window(*groups, others=[beside]), form=form)
    assert batch.sample_counts == {"on_cpu": 1, "off_cpu": 2}
    (profile,) = [profile for profile in result.profiles if profile.kind == OFF_CPU]
    totals = {one.resource.attributes["process.pid"]: one.waits for one in profile.resources}
    assert totals == {7: TOTALS, 8: quiet, 9: None}
    assert (profile.threshold_ns, profile.taken) == (1_500_000, len(WAITS))
    assert profile.waits == WaitTotals((10, 8_000_000_000, 0, 0, 2), 17, 3)


def test_wait_totals_are_sent_once_if_a_window_is_split():
    samples = [sample(WAITS[1 + number % 2], number, (5, 6, 7)) for number in range(400)]
    samples = [one._replace(tid=number) for number, one in enumerate(samples)]
    groups = [
        ResourceSamples(resource(7), samples, TOTALS),
        ResourceSamples(resource(8), [], TOTALS),
    ]
    batches, (result,) = received(window(*groups), max_bytes=6000)
    assert len(batches) > 2
    assert result.profiles[0].waits == TOTALS.plus(TOTALS)
    assert result.profiles[0].weight == 400 * 18


def test_wait_totals_for_equal_resources_are_summed():
    groups = [ResourceSamples(resource(7), [sample(WAITS[2], n)], TOTALS) for n in range(2)]
    _, (result,) = received(window(*groups))
    (group,) = result.profiles[0].resources
    assert group.waits == TOTALS.plus(TOTALS)


def test_wait_totals_can_be_added_and_summed_over_all_states():
    assert NO_WAITS.plus(TOTALS) == TOTALS
    assert TOTALS.total_ns == 4_000_000_006
