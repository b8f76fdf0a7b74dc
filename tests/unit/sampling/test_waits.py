"""Wait totals by process are computed from cumulative sums in the kernel."""

import random
from collections import Counter

import pytest

from otel_kprofiler.bpf.wait_maps import WaitThread
from otel_kprofiler.errors import HostError, KernelFeatureError
from otel_kprofiler.model import ProcessKey, WaitTotals
from otel_kprofiler.sampling import OffCpuConfig, SamplerConfig
from otel_kprofiler.sampling.wait_follower import plan_waits, wait_map_entries
from otel_kprofiler.sampling.wait_sums import WaitSums
from tests.raising import raising

KEY = ProcessKey(100, 5)
OFF = SamplerConfig(off_cpu=OffCpuConfig())


def thread(number=1, by_state=(0,) * 5, *, since=0, woken=0, waits=0, tgid=100, state=1, epoch=1):
    return WaitThread(number, 5, since, woken, by_state, waits, 0, tgid, tgid, state, epoch, 0, 0)


def test_each_read_returns_only_new_changes():
    sums = WaitSums()
    first = sums.read([thread(by_state=(1, 2, 3, 4, 5), waits=2)], 100, 1)
    assert first == {KEY: WaitTotals((1, 2, 3, 4, 5), 2)}
    assert sums.read([thread(by_state=(1, 2, 3, 4, 5), waits=2)], 200, 1) == {}
    more = sums.read([thread(by_state=(1, 9, 3, 4, 5), waits=3), thread(2, waits=1)], 300, 1)
    assert more == {KEY: WaitTotals((0, 7, 0, 0, 0), 2)}


def test_the_elapsed_time_of_an_ongoing_wait_is_counted():
    sums = WaitSums()
    asleep = thread(since=50)
    assert sums.read([asleep], 100, 1)[KEY].by_state == (0, 50, 0, 0, 0)
    assert sums.read([asleep], 130, 1)[KEY].by_state == (0, 30, 0, 0, 0)
    assert sums.read([thread(since=50, woken=140)], 150, 1)[KEY].by_state == (10, 10, 0, 0, 0)
    assert sums.read([thread(by_state=(20, 90, 0, 0, 0), waits=1)], 170, 1) == {
        KEY: WaitTotals((10, 0, 0, 0, 0), 1)
    }


def test_a_wait_during_a_pause_does_not_hide_later_waits():
    sums = WaitSums()
    assert sums.read([thread(since=50)], 1050, 1)[KEY].by_state == (0, 1000, 0, 0, 0)
    assert sums.read([thread(since=50)], 2000, 0) == {}
    asleep = thread(since=3000, epoch=2)  # the wait of epoch 1 was not added to the sums
    assert sums.read([asleep], 3100, 2)[KEY].by_state == (0, 100, 0, 0, 0)
    sums.add_ended([thread(by_state=(0, 150, 0, 0, 0), epoch=2)])
    assert sums.read([], 3200, 2)[KEY].by_state == (0, 50, 0, 0, 0)


def test_waits_from_another_epoch_are_ignored():
    assert WaitSums().read([thread(since=50, epoch=1)], 100, 2) == {}
    assert WaitSums().read([thread(since=50, epoch=1)], 100, 0) == {}


def test_wait_sums_never_decrease_and_add_up_to_the_elapsed_time():
    """A wake-up that precedes a read may be recorded after the read."""
    sums = WaitSums()
    assert sums.read([thread(since=50)], 100, 1)[KEY].by_state == (0, 50, 0, 0, 0)
    assert sums.read([thread(since=50, woken=80)], 110, 1)[KEY].by_state == (10, 0, 0, 0, 0)
    assert sums.read([thread(by_state=(100, 30, 0, 0, 0), waits=1)], 200, 1) == {
        KEY: WaitTotals((70, 0, 0, 0, 0), 1)
    }


def test_the_remaining_time_of_an_exited_thread_is_counted():
    sums = WaitSums()
    sums.read([thread(since=50)], 100, 1)
    sums.add_ended([thread(by_state=(1, 80, 0, 0, 0), waits=1)])
    sums.add_ended([thread(2, by_state=(0, 7, 0, 0, 0), waits=1, tgid=200)])
    assert sums.read([thread(3)], 200, 1) == {
        KEY: WaitTotals((1, 30, 0, 0, 0), 1),
        ProcessKey(200, 5): WaitTotals((0, 7, 0, 0, 0), 1, has_ended=True),
    }, "another thread of the first process lives"


def test_successive_reads_sum_to_the_totals_of_all_threads():
    rng = random.Random(7)
    sums, reported, expected = WaitSums(), Counter(), Counter()
    living, now, number = {}, 1000, 0
    for _ in range(2000):
        now += rng.randrange(1, 50)
        if rng.random() < 0.1 or not living:
            number += 1
            living[number] = [0] * 5, [0]
        one = rng.choice(list(living))
        by_state, waits = living[one]
        state, duration = rng.randrange(5), rng.randrange(1000)
        by_state[state] += duration
        waits[0] += 1
        expected[state] += duration
        if rng.random() < 0.1:
            del living[one]
            sums.add_ended([thread(one, tuple(by_state), waits=waits[0])])
        if rng.random() < 0.1:
            threads = [thread(n, tuple(s), waits=w[0]) for n, (s, w) in living.items()]
            for totals in sums.read(threads, now, 1).values():
                reported.update(dict(enumerate(totals.by_state)))
    threads = [thread(n, tuple(s), waits=w[0]) for n, (s, w) in living.items()]
    for totals in sums.read(threads, now, 1).values():
        reported.update(dict(enumerate(totals.by_state)))
    assert reported == expected


class Files:
    def __init__(self, text):
        self.text = text

    def read_bytes(self, _path):
        if self.text is None:
            raise FileNotFoundError
        return self.text


@pytest.mark.parametrize(
    ("text", "room"),
    [
        (b"0.1 0.2 0.3 2/300 77\n", 16_384),
        (b"0.1 0.2 0.3 2/20000 77\n", 131_072),
        (b"0.1 0.2 0.3 2/4000000 77\n", 1 << 20),
        (b"", 16_384),
        (None, 16_384),
    ],
)
def test_the_map_size_is_four_times_the_number_of_threads(text, room):
    entries = wait_map_entries(object(), Files(text), 4)
    assert entries == {"buckets": room // 16, "threads": room, "wait_lines": 4}


def test_the_error_states_why_waits_cannot_be_sampled():
    no_types = raising(FileNotFoundError())
    assert plan_waits(SamplerConfig(), no_types, "bcc") is None
    with pytest.raises(HostError, match="bcc"):
        plan_waits(OFF, no_types, "bcc")
    with pytest.raises(KernelFeatureError, match="BTF"):
        plan_waits(OFF, no_types, "libbpf")


def test_a_command_whose_waits_are_sampled_must_be_a_target():
    with pytest.raises(ValueError, match="target_pids"):
        SamplerConfig(off_cpu=OffCpuConfig(), child_pid=5)
