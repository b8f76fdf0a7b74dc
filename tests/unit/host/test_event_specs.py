"""Events are parsed into a name and a setting. Errors state why an event cannot be opened."""

import errno
import re

import pytest

from otel_kprofiler.host import Access, EventSpec, LockSpec, find_event_error, parse_event


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("page-faults", EventSpec("page-faults", 0, 99)),
        ("faults", EventSpec("page-faults", 0, 99)),
        ("cs:period=7", EventSpec("context-switches", 7, 0)),
        ("cycles:freq=997", EventSpec("cycles", 0, 997)),
        ("task-clock:freq=49", EventSpec("cpu-clock", 0, 49)),
        ("lock-contention", LockSpec(99)),
        ("lock-contention:freq=20", LockSpec(20)),
    ],
)
def test_an_event_is_parsed_with_a_period_or_a_rate(text, spec):
    assert parse_event(text, 99) == spec


def test_the_default_period_applies_to_events_without_a_period_or_rate():
    assert parse_event("page-faults", 99, 5) == EventSpec("page-faults", 5, 0)
    assert parse_event("page-faults:freq=9", 99, 5) == EventSpec("page-faults", 0, 9)
    assert parse_event("cpu-clock", 99, 5) == EventSpec("cpu-clock", 0, 99)
    assert parse_event("lock-contention", 99, 5) == LockSpec(99)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("page-fault", "did you mean page-faults"),
        ("", "no event is called ''"),
        ("page-faults:u", "write page-faults:period=N"),
        ("page-faults:period=0", "write page-faults:period=N"),
        ("page-faults:period=x", "write page-faults:period=N"),
        ("page-faults:freq=10001", "at most 10,000"),
        ("cpu-clock:period=5", "cpu-clock does not support a period"),
        ("lock-contention:period=5", "lock-contention does not support a period"),
        ("lock-contentions", "did you mean lock-contention"),
    ],
)
def test_the_error_for_an_invalid_event_states_what_is_valid(text, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_event(text, 99)


def host(tmp_path, devices):
    for name in devices:
        (tmp_path / "sys/bus/event_source/devices" / name).mkdir(parents=True)
    return Access(str(tmp_path))


@pytest.mark.parametrize(
    ("code", "name", "devices", "message"),
    [
        (errno.ENOENT, "cycles", ["software"], ("found no performance counters", "pmu=on")),
        (errno.ENOENT, "bus-cycles", ["cpu", "software"], ("cannot sample bus-cycles", "help")),
        (errno.EBUSY, "cycles", ["cpu"], ("are in use", "nmi_watchdog")),
        (errno.EINVAL, "page-faults", [], ("99 samples per second", "period=N")),
    ],
)
def test_the_error_opening_an_event_states_the_reason(tmp_path, code, name, devices, message):
    spec = EventSpec(name, 0, 99)
    error = find_event_error(OSError(code, "x"), name, spec.attributes, host(tmp_path, devices))
    assert message[0] in str(error)
    assert message[1] in error.hint


def test_an_os_error_unrelated_to_the_event_yields_no_event_error(tmp_path):
    attributes = EventSpec("page-faults", 1).attributes
    error = OSError(errno.EMFILE, "x")
    assert find_event_error(error, "page-faults", attributes, host(tmp_path, [])) is None
