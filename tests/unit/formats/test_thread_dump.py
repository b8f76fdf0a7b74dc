"""Thread dumps are shown as text, JSON and folded stacks."""

import json

import pytest

from otel_kprofiler.formats import describe_ns, dump_folded, dump_json, dump_table
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    Frame,
    Line,
    Module,
    ModuleKind,
    ProcessState,
    SpanLink,
    Stack,
    ThreadState,
    WaitCause,
    WaitState,
)

LIBC = Module("libc.so.6", ModuleKind.USER, None, None, 0)


def frame(side, function, *, module=None, file="", line=0):
    return Frame(module, 16, (Line(function, file=file, line=line),), 0, side)


WAITING = Stack.from_frames([
    frame(KERNEL_SIDE, "futex_do_wait"),
    frame(USER_SIDE, "sem_wait", module=LIBC),
    frame(PYTHON_SIDE, "rest", file="/srv/shop.py", line=7),
])  # fmt: skip
SLEEP = WaitState.INTERRUPTIBLE
D = WaitState.UNINTERRUPTIBLE


def thread(tid, state=SLEEP, cause=WaitCause.FUTEX, stack=WAITING, **options):
    waited_ns = None if state is None else 1_500_000_000 * tid
    return ThreadState(42, tid, f"pool-{tid}", state, waited_ns, cause, stack, 3, **options)


def process(*threads, ended=0):
    return ProcessState(42, "shop", threads, ended, 0)


def test_identical_stacks_are_shown_once_with_the_leaf_first():
    assert dump_table([process(thread(1), thread(2))]) == (
        "process 42 (shop): 2 threads\n"
        "\n"
        "2 threads: interruptible, futex for 1.5 s to 3.0 s\n"
        "  1 pool-1, 2 pool-2\n"
        "    futex_do_wait\n"
        "    sem_wait [libc.so.6]\n"
        "    rest (shop.py:7)\n"
    )


def test_threads_that_may_block_other_threads_are_listed_first_and_idle_threads_last():
    text = dump_table([
        process(
            thread(1, cause=WaitCause.POLL), thread(2, cause=WaitCause.POLL), thread(3),
            thread(4, D, WaitCause.DISK), thread(5, None, None, Stack()), ended=1,
        )
    ])  # fmt: skip
    heads = [line for line in text.splitlines() if line.startswith(("1 thread", "2 thread"))]
    assert [head.split(" for")[0] for head in heads] == [
        "1 thread: running",
        "1 thread: uninterruptible, disk",
        "1 thread: interruptible, futex",
        "2 threads: interruptible, poll",
    ]
    assert text.startswith("process 42 (shop): 5 threads, 1 ended\n")


def test_only_some_threads_in_a_large_group_are_listed_and_the_rest_are_counted():
    text = dump_table([process(*(thread(tid) for tid in range(2000)))])
    assert "7 pool-7 and 1,992 more\n" in text
    assert len(text.splitlines()) == 7


def test_threads_that_moved_between_dumps_are_listed_separately():
    text = dump_table([process(thread(1, has_moved=True), thread(2, has_moved=False))])
    assert "1 thread: interruptible, futex for 1.5 s, moved\n" in text
    assert "1 thread: interruptible, futex for 3.0 s, not moved\n" in text


def test_lines_fit_the_terminal_and_contain_no_control_characters():
    text = dump_table([process(thread(1)._replace(name="\x1b[2J"))], width=20)
    assert "\\x1b[2J" in text
    assert max(map(len, text.splitlines())) == 20


def test_the_json_output_contains_each_stack_once():
    threads = (
        thread(1, link=SpanLink(bytes(15) + b"\1", bytes(7) + b"\2"), labels=(("user", "7"),)),
        thread(2),
        thread(3, None, None, Stack()),
    )
    document = json.loads(dump_json([process(*threads)], time="now", interval_s=1.0))
    (shown,) = document["processes"]
    assert [one["stack"] for one in shown["threads"]] == [0, 0, 1]
    assert shown["threads"][0] == {
        "tid": 1, "name": "pool-1", "state": "interruptible", "cause": "futex",
        "waited_seconds": 1.5, "context_switches": 3, "moved": None, "trace_id": "0" * 31 + "1",
        "span_id": "0" * 15 + "2", "labels": {"user": "7"}, "stack": 0,
    }  # fmt: skip
    assert (shown["threads"][2]["state"], shown["threads"][2]["cause"]) == ("running", None)
    assert document["stacks"] == [
        [
            {"function": "futex_do_wait", "side": "kernel"},
            {"function": "sem_wait", "side": "user", "module": "libc.so.6"},
            {"function": "rest", "side": "python", "file": "/srv/shop.py", "line": 7},
        ],
        [],
    ]
    assert (document["time"], document["interval_seconds"]) == ("now", 1.0)


def test_folded_stacks_count_threads_by_wait_cause():
    assert dump_folded([process(thread(1), thread(2), thread(3, None, None, Stack()))]) == (
        "shop;[running] 1\n"
        "shop;rest (shop.py:7)_[p];sem_wait;futex_do_wait_[k];[futex] 2\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 µs"),
        (999_999, "999 µs"),
        (1_500_000, "1.5 ms"),
        (12_340_000_000, "12.3 s"),
        (61_000_000_000, "1 m 1 s"),
        (7_500_000_000_000, "2 h 5 m"),
        (90_000_000_000_000, "1 d 1 h"),
    ],
)
def test_durations_have_at_most_two_units(duration_ns, text):
    assert describe_ns(duration_ns) == text
