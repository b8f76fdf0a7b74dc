"""``report --by part`` and ``report --by trace`` show how spans spend their time."""

import json

import pytest

from otel_kprofiler.cli.report import command
from otel_kprofiler.model import (
    OFF_CPU,
    USER_SIDE,
    SpanLink,
    Stack,
    WaitCause,
    WaitState,
    Window,
    WindowSample,
    WindowWait,
)
from tests.commands import invoke
from tests.windows import make_frame, make_profile, make_stack, write_otlp

MS = 1_000_000
START = 1_600_000_000_000_000_000
STACKS = {"user": Stack.from_frames([make_frame("work", USER_SIDE)]), "kernel": make_stack("work")}
A, B, CHILD = (
    SpanLink(b"\1" * 16, b"\4" * 8, "GET /a"),
    SpanLink(b"\2" * 16, b"\5" * 8, "GET /b"),
    SpanLink(b"\1" * 16, b"\3" * 8, "GET /a"),
)


def write(path, *timeline, service=None):
    """Writes a profile from actions: (start in ms, span, activity, duration in ms, thread).

    Running threads are sampled every millisecond.
    """
    running, waiting = [], []
    for at, link, what, length, *thread in timeline:
        tid = thread[0] if thread else 7
        if what in STACKS:
            times = [START + (at + more) * MS for more in range(length)]
            running.append(WindowSample(STACKS[what], tid, "shop", 0, link, times))
        else:
            waiting.append(
                WindowSample(
                    STACKS["kernel"], tid, "shop", 0, link, [START + at * MS], [length * MS], (),
                    WindowWait(WaitState.INTERRUPTIBLE, WaitCause(what)),
                )
            )  # fmt: skip
    named = {"service.name": service} if service else {}
    shop = {"process.pid": 7, "process.executable.name": "shop", **named}
    profiles = [
        make_profile((shop, running), period_ns=MS),
        make_profile((shop, waiting), kind=OFF_CPU, period_ns=0),
    ]
    return write_otlp(path, Window(START, START + 10**10, profiles))


def parts(*arguments):
    result = json.loads(invoke(command, "--by", "part", "--json", *arguments).output)
    assert result["total"] == sum(row["self"] for row in result["groups"])
    return {row["name"]: row["self"] // MS for row in result["groups"]}


@pytest.fixture
def synchronous(tmp_path):
    """Writes a profile of two successive requests, with other work around them."""
    return write(
        tmp_path / "sync.otlp",
        (0, None, "user", 5),
        (5, A, "user", 2), (7, A, "sleep", 4), (11, A, "kernel", 3),
        (14, None, "poll", 100),
        (114, B, "futex", 6), (120, B, "user", 1),
        (121, None, "user", 9),
    )  # fmt: skip


def test_the_parts_of_a_synchronous_span_sum_to_its_duration(synchronous):
    assert parts(synchronous) == {
        "user code": 3, "kernel": 3, "wait: sleep": 4, "wait: futex": 6,
    }  # fmt: skip
    assert parts("--span", A.span_id.hex(), synchronous) == {
        "user code": 2, "kernel": 3, "wait: sleep": 4,
    }  # fmt: skip
    assert parts("--endpoint", "GET /b", synchronous) == {"user code": 1, "wait: futex": 6}


@pytest.fixture
def asynchronous(tmp_path):
    """Writes a profile of a task that awaits a second task, an event and a callback."""
    return write(
        tmp_path / "async.otlp",
        (0, None, "epoll", 50),
        (50, A, "user", 2),
        (52, B, "user", 3), (55, B, "kernel", 1), (56, None, "epoll", 10),
        (66, None, "user", 4), (70, CHILD, "user", 2), (72, A, "user", 1),
        (73, B, "user", 5),
        (0, None, "user", 60, 8), (60, B, "user", 1, 8), (61, None, "user", 40, 8),
    )  # fmt: skip


def test_the_parts_of_an_asynchronous_span_include_other_work_on_its_thread(asynchronous):
    assert parts("--span", A.span_id.hex(), asynchronous) == {
        "user code": 3, "other tasks": 3 + 1 + 4, "event loop waited": 10,
        "other spans of the trace": 2,
    }  # fmt: skip
    assert parts("--span", A.trace_id.hex(), asynchronous) == {
        "user code": 5, "other tasks": 8, "event loop waited": 10,
    }  # fmt: skip


def test_a_span_on_two_threads_includes_the_time_on_both_threads(asynchronous):
    assert parts("--endpoint", "GET /b", asynchronous) == {
        "user code": 3 + 5 + 1, "kernel": 1, "event loop waited": 10, "other tasks": 4 + 2 + 1,
    }  # fmt: skip


def test_samples_inside_and_outside_a_span_may_have_the_same_timestamp(tmp_path):
    same = [(0, link, "user", 1) for link in (None, A)]
    assert parts(write(tmp_path / "same.otlp", *same, (1, A, "user", 1))) == {"user code": 2}


def test_the_breakdown_of_span_time_is_printed(synchronous):
    assert invoke(command, "--by", "part", "--thread", "7", synchronous).output.splitlines() == [
        "2 traces, 16.0 ms on threads",
        " ms  share  samples  part",
        "6.0  37.5%        1  wait: futex",
        "4.0  25.0%        1  wait: sleep",
        "3.0  18.8%        3  kernel",
        "3.0  18.8%        3  user code",
    ]


@pytest.mark.parametrize("by", ["part", "trace"])
def test_the_error_for_missing_spans_suggests_how_to_record_them(tmp_path, by):
    path = write(tmp_path / "none.otlp", (0, None, "user", 5))
    done = invoke(command, "--by", by, path, status=1)
    assert "no sample belongs to a span" in str(done.exception)
    assert "docs/spans.md" in done.exception.hint


@pytest.mark.parametrize("by", ["part", "trace"])
def test_span_times_are_available_only_as_a_table(synchronous, tmp_path, by):
    done = invoke(command, "--by", by, "-o", tmp_path / "x.html", synchronous, status=2)
    assert "omit -o" in done.output


def times(*arguments):
    """Returns the spans' user, kernel and waiting times, in milliseconds."""
    output = invoke(command, "--by", "trace", "--json", *arguments).output
    return {
        (span["service"], span["span_id"]): (
            span["user"] // MS, span["kernel"] // MS, span["waited"] // MS,
        )
        for span in json.loads(output)["spans"]
    }  # fmt: skip


def test_span_times_are_divided_into_user_kernel_and_waiting_time(synchronous):
    assert times(synchronous) == {
        ("-", A.span_id.hex()): (2, 3, 4), ("-", B.span_id.hex()): (1, 0, 6),
    }  # fmt: skip
    assert list(times("--endpoint", "GET /b", synchronous).values()) == [(1, 0, 6)]


def test_the_waiting_time_of_a_span_includes_event_loop_waits_but_not_other_spans(asynchronous):
    assert times(asynchronous) == {
        ("-", A.span_id.hex()): (3, 0, 10),
        ("-", CHILD.span_id.hex()): (2, 0, 0),
        ("-", B.span_id.hex()): (9, 1, 10),
    }  # fmt: skip


def test_event_loop_waits_are_charged_to_the_last_active_span(tmp_path):
    path = write(
        tmp_path / "child.otlp",
        (0, A, "user", 1), (1, None, "epoll", 5), (6, CHILD, "user", 1), (7, None, "poll", 20),
        (27, CHILD, "user", 1), (28, A, "user", 1), (29, None, "epoll", 100),
    )  # fmt: skip
    assert list(times(path).values()) == [(2, 0, 5), (2, 0, 20)]
    assert list(times("--span", CHILD.span_id.hex(), path).values()) == [(2, 0, 20)]


def test_spans_in_a_trace_are_grouped_and_show_their_service(tmp_path):
    for name, *timeline in (
        ("front", (0, A, "user", 1), (1, A, "poll", 30), (31, A, "kernel", 1)),
        ("stock", (10, CHILD, "kernel", 4), (5, B, "user", 20)),
    ):
        write(tmp_path / name, *timeline, service=name)
    files = [str(tmp_path / name) for name in ("stock", "front")]
    assert list(times(*files).items()) == [
        (("front", A.span_id.hex()), (1, 1, 30)),
        (("stock", CHILD.span_id.hex()), (0, 4, 0)),
        (("stock", B.span_id.hex()), (20, 0, 0)),
    ]
    trace = A.trace_id.hex()
    assert invoke(command, "--by", "trace", "-n", "2", *files).output.splitlines() == [
        "2 traces, 3 spans, 56.0 ms on threads",
        "user ms  kernel ms  waited ms  service  endpoint  trace" + " " * 29 + "span",
        f"    1.0        1.0       30.0  front    GET /a    {trace}  {A.span_id.hex()}",
        f"    0.0        4.0        0.0  stock    GET /a    {trace}  {CHILD.span_id.hex()}",
        "1 more; --limit 0 shows all",
    ]
