"""Few files at a time have a turn; waiting files stay open up to a limit."""

import pytest

from otel_kprofiler.unwinding.build_queue import KEEP_NS, MAX_KEPT, BuildQueue
from tests.unit.unwinding.opened import is_open, opened, request


@pytest.fixture
def builds(clock):
    queue = BuildQueue(0.5, clock)
    yield queue
    queue.close()


def test_a_file_that_waits_for_its_turn_stays_open(builds):
    file = opened(1)
    builds.put(file.request)
    builds.keep(file.request.key, file.code)
    assert not builds.has_turn(file.request.key)
    assert builds.take(1) == file
    assert builds.has_turn(file.request.key)
    assert is_open(file.code.file.fd)
    file.code.close()


def test_a_file_above_the_limit_is_reopened_for_its_turn(builds):
    files = [opened(inode) for inode in range(MAX_KEPT + 1)]
    kept = []
    for file in files:
        builds.put(file.request)
        kept.append(builds.keep(file.request.key, file.code))
    assert kept == [True] * MAX_KEPT + [False]
    taken = [builds.take(len(files)) for _ in files]
    assert [item.code for item in taken] == [file.code for file in files[:-1]] + [None]
    for file in files:
        file.code.close()


def test_a_file_that_waits_for_long_is_handed_over_to_be_closed(builds, clock):
    first, second = opened(1), opened(2)
    for file in (first, second):
        builds.put(file.request)
        builds.keep(file.request.key, file.code)
        clock.ns += KEEP_NS // 2
    assert builds.take_old() == [(first.request.key, first.code)]
    assert builds.take_old() == []
    assert builds.take(2).code is None
    assert builds.take(2).code == second.code
    for file in (first, second):
        file.code.close()


def test_only_a_given_number_of_files_have_a_turn(builds):
    for inode in range(3):
        builds.put(request(inode))
    assert builds.take(2)
    assert builds.take(2)
    assert builds.take(2) is None
    builds.end_turn(request(0).key)
    assert builds.take(2).request == request(2)
    assert len(builds) == 0


def test_the_cost_of_a_build_delays_the_next_files_of_its_process(builds):
    for inode in (1, 2):
        builds.put(request(inode))
    builds.put(request(3, tgid=2))
    assert builds.take(1).request == request(1)
    builds.put(request(4, tgid=2))
    builds.charge(10_000_000)
    builds.end_turn(request(1).key)
    order = []
    while taken := builds.take(1):
        order.append(taken.request.key.inode)
        builds.end_turn(taken.request.key)
    assert order == [3, 4, 2]


def test_closing_the_queue_closes_the_files(builds):
    file = opened(1)
    builds.put(file.request)
    builds.keep(file.request.key, file.code)
    builds.close()
    assert not is_open(file.code.file.fd)
