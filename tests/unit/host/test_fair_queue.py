"""The fair queue divides CPU time fairly among the processes that cause work."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from otel_kprofiler.host.fair_queue import (
    MAX_OWNERS,
    RECENT_NS,
    RESERVE,
    TURN_NS,
    FairQueue,
    find_user,
)

SECOND_NS = 1_000_000_000
SHARE = 0.05


@pytest.fixture
def queue(clock):
    clock.ns = RECENT_NS
    return FairQueue(SHARE, clock)


def serve(queue, cpu_ns=0):
    turn = queue.take()
    queue.done(turn, cpu_ns)
    return turn.owner, turn.item


def test_owners_take_turns_regardless_of_queue_length(queue):
    for number in range(4):
        queue.put("noisy", number)
    queue.put("good", 0)
    queue.put("other", 0)
    assert [serve(queue) for _ in range(6)] == [
        ("noisy", 0), ("good", 0), ("other", 0), ("noisy", 1), ("noisy", 2), ("noisy", 3),
    ]  # fmt: skip
    assert queue.take() is None


def test_an_owner_of_costly_work_receives_fewer_turns(queue):
    for number in range(20):
        queue.put("costly", number)
        queue.put("cheap", number)
    turns = Counter()
    for _ in range(15):
        turn = queue.take()
        queue.done(turn, 9 * TURN_NS if turn.owner == "costly" else 0)
        turns[turn.owner] += 1
    assert turns == {"costly": 2, "cheap": 13}


def test_idle_time_earns_no_credit(queue):
    queue.put("early", 0)
    serve(queue, 0)
    for number in range(10):
        queue.put("busy", number)
        serve(queue, SECOND_NS // 100)
    for number in range(3):
        queue.put("early", number)
        queue.put("busy", number)
    owners = [serve(queue, SECOND_NS // 100)[0] for _ in range(4)]
    assert owners == ["early", "busy", "early", "busy"]


def test_concurrent_turns_are_granted_to_different_owners(queue):
    for number in range(3):
        queue.put("noisy", number)
    queue.put("good", 0)
    assert [queue.take().owner for _ in range(2)] == ["noisy", "good"]


def test_costly_work_for_one_owner_does_not_delay_other_owners(queue, clock):
    queue.put("hostile", 0)
    queue.put("hostile", 1)
    serve(queue, 4 * SECOND_NS)
    assert queue.wait_ns() > 50 * SECOND_NS
    assert queue.take() is None
    queue.put("good", 0)
    assert queue.wait_ns() == 0
    assert serve(queue, SECOND_NS // 10) == ("good", 0)
    queue.put("good", 1)
    assert queue.take() is None, "the reserve is for those that had no turn lately"
    clock.ns += RECENT_NS
    assert serve(queue) == ("good", 1)


def test_total_work_stays_within_the_cpu_share_after_an_initial_burst(queue, clock):
    spent, start_ns = 0, clock.ns
    for owner in range(400):
        queue.put(owner, 0)
    while clock.ns < start_ns + 300 * SECOND_NS:
        while queue.wait_ns() == 0:
            serve(queue, SECOND_NS // 10)
            spent += SECOND_NS // 10
        clock.ns += SECOND_NS // 10
    burst_ns = 2 * SECOND_NS
    assert spent <= 300 * SECOND_NS * SHARE + burst_ns + 2 * SECOND_NS // 10
    assert spent >= 300 * SECOND_NS * SHARE * (1 - RESERVE)


def test_the_newest_item_of_the_owner_with_the_most_items_is_dropped_first(queue):
    queue.put("good", 0)
    for number in range(3):
        queue.put("noisy", number)
    assert [queue.drop_last() for _ in range(2)] == [2, 1]
    queue.put("late", "late")
    assert queue.drop_last() == "late"
    assert len(queue) == 2
    assert [queue.drop_last() for _ in range(3)] == [0, 0, None]


@pytest.fixture
def grouped(clock):
    """Returns a queue whose owners are pairs of a group and a number."""
    clock.ns = RECENT_NS
    return FairQueue(SHARE, clock, lambda owner: owner[0])


def test_many_owners_in_a_group_do_not_delay_another_group(grouped):
    for number in range(100):
        grouped.put(("storm", number), number)
    serve(grouped)
    grouped.put(("good", 1), 0)
    assert serve(grouped)[0] == ("good", 1)
    grouped.put(("good", 2), 0)
    owners = [serve(grouped)[0][0] for _ in range(4)]
    assert owners.index("good") <= 1
    assert owners.count("storm") == 3


def test_a_new_owner_starts_with_the_cost_of_its_group(grouped):
    grouped.put(("many", "costly"), 0)
    grouped.done(grouped.take(), 2000 * TURN_NS)
    for number in range(50):
        grouped.put(("many", "busy"), number)
    grouped.put(("alone", 0), 0)
    grouped.done(grouped.take(), 1000 * TURN_NS)
    grouped.put(("alone", 0), 0)
    assert serve(grouped)[0] == ("alone", 0)
    grouped.put(("many", "new"), 0)
    assert [serve(grouped)[0][1] for _ in range(2)] == ["busy", "new"]


def test_the_cost_of_a_group_is_the_sum_of_its_owners_costs(grouped, clock):
    for number in range(10):
        grouped.put(("costly", number), 0)
        grouped.put(("cheap", number), 0)
    turns = Counter()
    for _ in range(9):
        turn = grouped.take()
        grouped.done(turn, 5 * TURN_NS if turn.owner[0] == "costly" else 0)
        turns[turn.owner[0]] += 1
    assert turns["costly"] <= 2


def test_the_newest_item_in_the_group_with_the_most_work_is_dropped_first(grouped):
    grouped.put(("good", 0), "good")
    for number in range(3):
        grouped.put(("storm", number), number)
    grouped.put(("good", 1), "late")
    assert grouped.drop_last() == 2
    assert len(grouped) == 4


def test_the_number_of_remembered_groups_is_bounded(grouped):
    for number in range(3 * MAX_OWNERS):
        grouped.put((number, 0), 0)
        serve(grouped)
    assert len(grouped._group_costs) <= MAX_OWNERS
    assert len(grouped._groups) <= MAX_OWNERS


def test_processes_are_grouped_by_user():
    assert find_user(os.getpid()) == os.geteuid()
    assert find_user(2**30) is None, "no such process"
    assert find_user("code") == "code", "no process"


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_the_owner_of_a_process_that_is_not_dumpable_is_the_user_that_runs_it():
    """The /proc files of processes that are not dumpable belong to root."""
    code = (
        "import ctypes, os; os.setresuid(65534, 65534, 65534); "
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        assert os.stat(f"/proc/{child.pid}/maps").st_uid == 0
        assert find_user(child.pid) == 65534
        child.communicate(b"\n")


def test_the_number_of_owners_with_recorded_costs_is_bounded(queue):
    for owner in range(3 * MAX_OWNERS):
        queue.put(owner, 0)
        serve(queue)
        queue.put(-owner - 1, 0)
        queue.drop_last()
    assert sum(map(len, queue._costs.values())) <= MAX_OWNERS


def test_all_work_is_accepted_after_the_limit_is_lifted(queue):
    for number in range(3):
        queue.put("only", number)
    serve(queue, 9 * SECOND_NS)
    assert queue.take() is None
    queue.lift_limit()
    assert [serve(queue)[1] for _ in range(2)] == [1, 2]


def test_all_queued_work_can_be_removed(queue):
    queue.put("one", 1)
    queue.put("two", 2)
    assert sorted(queue.clear()) == [1, 2]
    assert len(queue) == 0
    assert queue.wait_ns() is None
