"""Tracepoints are events with names, settings and units."""

import re

import pytest

from otel_kprofiler.host import TracepointSpec, parse_event
from otel_kprofiler.host.system_calls import number_calls

OPENAT = number_calls()["openat"]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("block_rq_issue", TracepointSpec("block_rq_issue", 1, "block_rq_issue")),
        ("kmem:mm_page_alloc:period=9", TracepointSpec("mm_page_alloc", 9, "mm_page_alloc")),
        ("sys_enter", TracepointSpec("sys_enter", 1, "sys_enter")),
        ("sys_enter:openat", TracepointSpec("sys_enter_openat", 1, "sys_enter", OPENAT)),
        (
            "raw_syscalls:sys_enter:openat:period=2",
            TracepointSpec("sys_enter_openat", 2, "sys_enter", OPENAT),
        ),
        ("syscalls:sys_enter_openat", TracepointSpec("sys_enter_openat", 1, "sys_enter", OPENAT)),
        ("sys_enter:0", TracepointSpec("sys_enter_0", 1, "sys_enter", 0)),
    ],
)
def test_tracepoints_are_specified_by_the_names_that_perf_uses(text, spec):
    assert parse_event(text, 99) == spec


def test_a_tracepoint_has_a_default_period_but_no_rate():
    spec = parse_event("kfree_skb", 99, 5)
    assert (spec.period, spec.rate) == (5, 0)
    assert str(spec) == "kfree_skb:period=5"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("kfree_skb:freq=9", "write kfree_skb:period=N"),
        ("kfree_skb:period=0", "write kfree_skb:period=N"),
        ("sys_enter:opena", "did you mean openat"),
        ("sys_enter:xyzzy", "a number is also possible"),
        ("skb:kfree:skb", "no event is called 'skb'"),
        ("skb:", "no event is called 'skb'"),
        ("kfree-skb", "no event is called 'kfree-skb'"),
    ],
)
def test_the_error_for_an_invalid_tracepoint_states_the_cause_or_the_fix(text, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_event(text, 99)


@pytest.mark.parametrize(
    ("text", "unit"), [("kfree_skb", "bytes"), ("sched_switch", "count"), ("mm_page_free", "bytes")]
)
def test_the_sample_kind_of_an_event_has_the_unit_of_its_values(text, unit):
    kind = parse_event(text, 99).kind
    assert (kind.name, kind.sample_type, kind.sample_unit) == (text, text, unit)


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        ("x86_64", {"read": 0, "openat": 257, "pkey_free": 331, "clone3": 435, "mseal": 462}),
        ("aarch64", {"io_setup": 0, "openat": 56, "newfstatat": 79, "clone3": 435, "mseal": 462}),
    ],
)
def test_system_call_numbers_match_the_architecture(machine, numbers):
    calls = number_calls(machine)
    assert {name: calls[name] for name in numbers} == numbers
    assert len(set(calls.values())) == len(calls)
