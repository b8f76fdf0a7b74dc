"""File requests are handled fairly, and the number of open files is limited."""

import threading

import pytest

from otel_kprofiler.unwinding.requests import MAX_OPEN, RequestQueue
from tests.unit.unwinding.opened import is_open, opened, request

SECOND_NS = 1_000_000_000


@pytest.fixture
def requests(clock):
    queue = RequestQueue(open_share=0.5, load_share=0.1, loaders=2, now_ns=clock)
    yield queue
    queue.stop()
    queue.close()


def test_new_files_are_opened_before_tables_of_open_files_are_loaded(requests):
    requests.put_opened(opened(1))
    requests.put(request(2))
    assert requests.take().item == request(2)
    taken = requests.take()
    assert taken.item.request == request(1)
    taken.item.code.close()


def test_files_are_opened_even_if_table_loading_has_exhausted_its_cpu_budget(requests, clock):
    requests.put_opened(opened(1))
    taken = requests.take()
    taken.item.code.close()
    requests.done(taken, 2 * SECOND_NS)
    requests.put_opened(opened(2))
    requests.put(request(3))
    assert requests.take().item == request(3)
    clock.ns += 20 * SECOND_NS
    later = requests.take()
    assert later.item.request == request(2)
    later.item.code.close()


def test_one_worker_is_reserved_for_opening_files(requests):
    for inode in range(3):
        requests.put_opened(opened(inode))
    taken = [requests.take(), requests.take()]
    got = []
    worker = threading.Thread(target=lambda: got.append(requests.take().item))
    worker.start()
    requests.put(request(9))
    worker.join(60)
    assert got == [request(9)]
    for each in taken:
        each.item.code.close()


def test_the_number_of_open_files_is_bounded(requests):
    files = [opened(inode) for inode in range(MAX_OPEN + 1)]
    fds = [each.code.file.fd for each in files]
    for each in files:
        requests.put_opened(each)
    assert [is_open(fd) for fd in fds] == [True] * MAX_OPEN + [False]
    requests.close()
    assert not any(map(is_open, fds))


def test_stopping_wakes_workers_and_files_opened_later_are_closed(requests):
    got = []
    worker = threading.Thread(target=lambda: got.append(requests.take()))
    worker.start()
    requests.stop()
    worker.join(60)
    assert got == [None]
    late = opened(1)
    requests.put_opened(late)
    assert not is_open(late.code.file.fd)


def test_requests_to_open_files_alternate_between_processes(requests):
    for inode in range(1, 100):
        requests.put(request(inode))
    requests.put(request(100, tgid=2))
    assert [requests.take().item.key.inode for _ in range(3)] == [1, 100, 2]


def test_unwind_tables_are_loaded_for_processes_in_turn(requests):
    for inode in range(1, 9):
        requests.put_opened(opened(inode))
    requests.put_opened(opened(9, tgid=2))
    turns = [requests.take(), requests.take()]
    assert [turn.item.request.key.inode for turn in turns] == [1, 9]
    for turn in turns:
        turn.item.code.close()
