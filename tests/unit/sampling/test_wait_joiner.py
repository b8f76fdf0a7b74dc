"""Wait samples are built by joining start and end records."""

import os
import random
import threading
from collections import defaultdict

import pytest

from otel_kprofiler.bpf import WAIT_UNIT_NS, WaitEnd, WaitRecord, WaitThread
from otel_kprofiler.bpf.wait_maps import (
    WAIT_HAS_BEGUN,
    WAIT_IN_IOWAIT,
    WAIT_IS_THROTTLED,
    WAIT_KEPT,
)
from otel_kprofiler.model import KERNEL_SIDE, OFF_CPU, STACK_OK, RawSample, WaitState, Waker
from otel_kprofiler.sampling import WaitJoiner
from otel_kprofiler.sampling.off_cpu import MAX_THRESHOLD_NS
from otel_kprofiler.sampling.own_threads import OwnThreads
from otel_kprofiler.sampling.wait_joiner import FIRST_THRESHOLD_NS, ThresholdControl

SECOND = 10**9
BOOT = 50 * SECOND  # CLOCK_BOOTTIME minus CLOCK_MONOTONIC
SLEEPING = WaitState.INTERRUPTIBLE
BOTH = WAIT_HAS_BEGUN | WAIT_KEPT


def sample(time_ns, since, *, tid=7, cpu=0, stack=b""):
    return RawSample(
        OFF_CPU, since, BOOT + time_ns, cpu, 5, tid, 3, 0, b"waiter",
        ((KERNEL_SIDE, STACK_OK),) if stack else (), (stack,) if stack else (), None,
    )  # fmt: skip


def begin(since, **more):
    return WaitRecord(sample(since, since, stack=b"12345678", **more), None)


def end(
    since, asleep, runnable=0, *, flags=BOTH, threshold=100, state=SLEEPING, waker=None, **more
):
    return WaitRecord(
        sample(since + asleep + runnable, since, **more),
        WaitEnd(since, asleep, runnable, threshold, state, flags, waker),
    )


def thread(since, *, woken=0, flags=WAIT_HAS_BEGUN, threshold=100, state=1, tid=7, epoch=1):
    return WaitThread(tid, 3, since, woken, (0,) * 5, 0, 0, 5, tid, state, epoch, threshold, flags)


def test_a_long_wait_is_reported_with_its_exact_duration():
    joiner, waker = WaitJoiner(), Waker(8, 9, b"other")
    (sample,) = joiner.join([begin(1000), end(1000, 500, waker=waker, cpu=3)])
    assert sample.value == sample.wait.duration_ns == 500
    assert sample.wait.state is SLEEPING
    assert sample.wait.is_ended
    assert sample.wait.waker == waker
    assert sample.wait.start_ns == BOOT + 1000
    assert (sample.time_ns, sample.cpu, sample.stacks) == (BOOT + 1500, 3, (b"12345678",))
    assert joiner.added == 0


def test_a_wait_shorter_than_the_threshold_is_weighted_by_the_threshold():
    (sample,) = WaitJoiner().join([begin(1000), end(1000, 20)])
    assert (sample.value, sample.wait.duration_ns) == (100, 20)


def test_the_weight_of_a_wait_is_divided_between_sleep_and_run_queue_time():
    joiner = WaitJoiner()
    asleep, runnable = joiner.join([begin(1000), end(1000, 20, 10, flags=BOTH | WAIT_IN_IOWAIT)])
    assert (asleep.wait.state, runnable.wait.state) == (SLEEPING, WaitState.RUNNABLE)
    assert (asleep.wait.duration_ns, runnable.wait.duration_ns) == (20, 10)
    assert (asleep.value, runnable.value) == (66, 34), "together the threshold"
    assert asleep.stacks == runnable.stacks
    assert (asleep.wait.in_iowait, runnable.wait.in_iowait) == (True, False)
    assert joiner.added == 1


def test_a_preemption_includes_no_sleep_time():
    flags = BOTH | WAIT_IS_THROTTLED
    (sample,) = WaitJoiner().join([begin(1), end(1, 0, 150, state=WaitState.RUNNABLE, flags=flags)])
    assert (sample.value, sample.wait.state, sample.wait.is_throttled) == (
        150,
        WaitState.RUNNABLE,
        True,
    )


def test_a_wait_without_the_kept_flag_is_dropped():
    joiner = WaitJoiner()
    assert joiner.join([begin(1000), end(1000, 20, flags=WAIT_HAS_BEGUN)]) == []
    (sample,) = joiner.join([end(1000, 20, flags=WAIT_KEPT, stack=b"late    ")])
    assert sample.stacks == (b"late    ",), "that of the end: the begin is gone"
    assert sample.wait.start_ns == BOOT + 1000


def test_a_wait_end_is_joined_only_with_the_matching_start():
    """An end record may belong to a later wait or to another thread."""
    joiner = WaitJoiner()
    (sample,) = joiner.join([begin(1000), end(5000, 200, flags=WAIT_KEPT)])
    assert sample.stacks == ()
    assert joiner.join([begin(6000), end(6000, 200, tid=8, flags=WAIT_HAS_BEGUN)]) == []
    (sample,) = joiner.join([end(6000, 200)])
    assert sample.stacks == (b"12345678",)


def test_a_wait_end_without_the_has_begun_flag_is_not_joined():
    """Without the flag, the thread has run since the begin record, so its span may have ended."""
    (wait,) = WaitJoiner().join([begin(1000), end(1000, 200, flags=WAIT_KEPT, stack=b"late    ")])
    assert wait.stacks == (b"late    ",)


def test_an_ongoing_wait_lasts_no_longer_than_the_time_since_its_start():
    joiner = WaitJoiner()
    joiner.join([begin(1000)])
    (wait,) = joiner.sample_lasting([thread(1000)], 9000, BOOT + 1600, 1)
    assert (wait.value, wait.wait.duration_ns) == (600, 600)


def test_the_time_of_an_ongoing_wait_is_reported_only_once():
    joiner = WaitJoiner()
    joiner.join([begin(1000)])
    (first,) = joiner.sample_lasting([thread(1000)], 1300, BOOT + 1300, 1)
    assert (first.value, first.wait.duration_ns, first.wait.is_ended) == (300, 300, False)
    assert (first.time_ns, first.stacks) == (BOOT + 1300, (b"12345678",))
    asleep, runnable = joiner.sample_lasting([thread(1000, woken=1350)], 1400, BOOT + 1400, 1)
    assert (asleep.value, runnable.value) == (50, 50)
    (rest,) = joiner.join([end(1000, 350, 200)])
    assert (rest.value, rest.wait.state) == (150, WaitState.RUNNABLE)
    assert joiner.added == 3


@pytest.mark.parametrize(
    "asleep",
    [
        thread(1000, threshold=301),  # below the threshold
        thread(1000, flags=0),
        thread(1000, epoch=2),
        thread(999),
        thread(0),
        thread(1000, tid=8),
    ],
)
def test_waits_without_a_matching_start_are_not_reported(asleep):
    joiner = WaitJoiner()
    joiner.join([begin(1000)])
    assert joiner.sample_lasting([asleep], 1300, BOOT + 1300, 1) == []


def test_exited_threads_are_forgotten():
    joiner = WaitJoiner()
    joiner.join([begin(1000), begin(1000, tid=8)])
    joiner.forget([thread(1000)._replace(ended_ns=BOOT + 1000)])
    lasting = joiner.sample_lasting([thread(1000), thread(1000, tid=8)], 1300, BOOT + 1300, 1)
    assert [sample.tid for sample in lasting] == [8]
    joiner.clear()
    assert joiner.sample_lasting([thread(1000, tid=8)], 1400, BOOT + 1400, 1) == []


def test_forgetting_a_thread_keeps_the_wait_of_a_later_thread_with_the_same_id():
    joiner = WaitJoiner()
    joiner.join([begin(900), begin(1000)])
    joiner.forget([thread(900)._replace(ended_ns=BOOT + 950)])
    (sample,) = joiner.join([end(1000, 500)])
    assert (sample.comm, sample.wait.start_ns) == (b"waiter", BOOT + 1000)
    assert sample.stacks


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_waits_is_reported_exactly(seed):
    """A simple model sums the larger of the duration and the threshold over all waits."""
    rng = random.Random(seed)
    joiner, now = WaitJoiner(), 1000
    waiting, expected, reported, kept, taken = {}, {}, defaultdict(int), 0, 0
    for _ in range(3000):
        now += rng.randrange(1, 60)
        tid = rng.randrange(10)
        records, result = [], []
        if tid not in waiting:
            has_begun = rng.random() < 0.7
            waiting[tid] = now, has_begun, rng.randrange(1, 200)
            if has_begun:
                records.append(begin(now, tid=tid))
        elif rng.random() < 0.5:
            since, has_begun, threshold = waiting.pop(tid)
            duration = now - since
            runnable = rng.randrange(duration + 1)
            keeps = duration >= threshold or rng.random() < 0.5
            flags = has_begun * WAIT_HAS_BEGUN | keeps * WAIT_KEPT
            if flags:
                records.append(
                    end(since, duration - runnable, runnable, flags=flags, threshold=threshold,
                        tid=tid)
                )  # fmt: skip
            if keeps:
                taken += 1
                expected[tid, since] = max(duration, threshold)
        if rng.random() < 0.2:
            threads = [
                thread(since, flags=has_begun * WAIT_HAS_BEGUN, threshold=threshold, tid=tid)
                for tid, (since, has_begun, threshold) in waiting.items()
            ]
            result = joiner.sample_lasting(threads, now, BOOT + now, 1)
            for sample in result:
                since, _, threshold = waiting[sample.tid]
                assert now - since >= threshold
                reported[sample.tid, since] += sample.value
        for sample in joiner.join(records):
            reported[sample.tid, sample.wait.start_ns - BOOT] += sample.value
            kept += 1
        kept += len(result)
    going_on = {
        (tid, since): now - since
        for tid, (since, *_) in waiting.items()
        if (tid, since) in reported
    }
    assert {key: value for key, value in reported.items() if key not in going_on} == expected
    assert all(reported[key] <= passed for key, passed in going_on.items())
    assert kept == taken + joiner.added


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_ongoing_waits_stay_within_the_budget_and_sum_to_the_total(seed):
    joiner, rounds, rng = WaitJoiner(random.Random(seed)), 60, random.Random(seed)
    joiner.join([begin(1000, tid=tid) for tid in range(500)])
    now, samples, largest = 1000, [], 0
    for _ in range(rounds):
        now += rng.randrange(100, 300)
        threads = [thread(1000, tid=tid, woken=rng.choice([0, now - 50])) for tid in range(500)]
        round_ = joiner.sample_lasting(threads, now, BOOT + now, 1, 50)
        samples += round_
        largest = max(largest, joiner.lasting_threshold_ns)
        assert len({sample.tid for sample in round_}) < 100
    assert joiner.added == len(samples)
    waits = len({(sample.tid, sample.time_ns) for sample in samples})
    assert waits == pytest.approx(50 * rounds, rel=0.15)
    error = largest * waits**0.5
    assert sum(sample.value for sample in samples) == pytest.approx(
        500 * (now - 1000), abs=4 * error
    )


def test_the_last_sample_of_a_wait_is_weighted_for_a_raised_threshold():
    """The rest of the wait was sampled with probability 500 / 2000, so its weight is four."""
    joiner = WaitJoiner()
    joiner.join([begin(1000)])
    joiner.sample_lasting([thread(1000)], 1300, BOOT + 1300, 1)
    (rest,) = joiner.join([end(1000, 500, threshold=2000)])
    assert (rest.value, rest.wait.duration_ns) == (200 * 2000 // 500, 200)


FIRST = -(-FIRST_THRESHOLD_NS // WAIT_UNIT_NS) * WAIT_UNIT_NS


def test_the_threshold_adapts_to_the_rate_of_waits():
    control = ThresholdControl(1000, 0, 20)
    assert control.threshold_ns == FIRST
    assert not control.update(SECOND // 2, 500, 10), "once a second"
    assert control.update(SECOND, 15, 10)
    assert control.threshold_ns == pytest.approx(1.5 * FIRST, abs=WAIT_UNIT_NS)
    assert not control.update(2 * SECOND, 25, 10)
    for second in range(3, 40):
        control.update(second * SECOND, 25, 10)
    assert control.threshold_ns == 1024, "nothing shorter is wanted"
    for second in range(40, 80):
        control.update(second * SECOND, second * 10**6, 10)
    assert control.threshold_ns == MAX_THRESHOLD_NS


def test_the_threshold_is_updated_if_the_bpf_program_raises_it():
    control = ThresholdControl(1000, 0, 20)
    for threshold in (FIRST, 100 * FIRST, 1000 * FIRST):
        control.note(threshold)
    assert control.update(SECOND, 10, 10)
    assert control.threshold_ns == pytest.approx(367 * FIRST, abs=WAIT_UNIT_NS)


@pytest.mark.parametrize(
    ("rate", "first"), [(0, 10**7), (5, 10**7), (200, 10**6), (10_000, 20_000)]
)
def test_the_initial_threshold_is_lower_for_higher_rates(rate, first):
    for least, wanted in ((1000, first), (10**8, 10**8)):
        threshold = ThresholdControl(least, 0, rate).threshold_ns
        assert threshold % WAIT_UNIT_NS == 0
        assert 0 <= threshold - wanted < WAIT_UNIT_NS


def test_the_wait_sampling_threshold_converges():
    rng, control, taken = random.Random(3), ThresholdControl(1, 0, 20), 0
    for second in range(1, 30):
        earlier = taken
        for _ in range(5000):
            duration = rng.lognormvariate(14, 2)
            taken += rng.random() < min(1, duration / control.threshold_ns)
        control.update(second * SECOND, taken, 40)
    assert taken - earlier == pytest.approx(40, rel=0.7)


def test_waits_of_excluded_threads_are_not_sampled():
    joiner = WaitJoiner(is_left_out=lambda sample: sample.tid == begin(0)[0].tid)
    assert joiner.join([begin(1000), end(1000, 20)]) == []
    assert joiner.added == -1, "the program has counted it"


def test_the_profilers_threads_are_excluded_by_pid_or_by_thread_id():
    with_thread = OwnThreads("threads")
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="kprofiler-test")
    thread.start()
    try:
        with_thread.update()
        pid = os.getpid()
        assert with_thread.has(pid, thread.native_id)
        assert not with_thread.has(pid, pid)
        assert not with_thread.has(pid + 1, thread.native_id)
        assert OwnThreads("process").has(pid, pid)
        assert not OwnThreads("").has(pid, pid)
    finally:
        done.set()
        thread.join()
