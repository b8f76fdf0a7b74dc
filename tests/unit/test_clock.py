"""Boottime is converted to Unix time, even after clock steps and suspend."""

import pytest

from otel_kprofiler.clock import EARLIEST_UNIX_NS, STEP_NS, Clock

SECOND = 1_000_000_000
NOW = 1_790_000_000 * SECOND


class Script:
    """Clocks with a scripted duration for each read of the boottime."""

    def __init__(self, offset=NOW):
        self.boot, self.offset, self.delays = 0, offset, iter(())

    def boot_ns(self):
        self.boot += next(self.delays, 0)
        return self.boot

    def unix_ns(self):
        return self.boot + self.offset


def test_the_clock_offset_is_taken_from_the_fastest_of_several_reads():
    source = Script()
    # The clock is read in pairs. The delay within a pair varies.
    source.delays = iter([0, 1001, 0, 5003, 0, 901, 0, 2, 0, 777])
    assert abs(Clock(source).to_unix_ns(0) - NOW) <= 1


@pytest.mark.parametrize("step", [-3600, -1, 1, 86_400])
def test_a_clock_step_is_applied_immediately(step):
    source = Script()
    clock = Clock(source)
    source.offset += step * SECOND
    assert clock.follow() == step * SECOND
    assert clock.to_unix_ns(5) == 5 + source.offset
    assert clock.follow() == 0


def test_measurement_errors_are_not_mistaken_for_clock_steps():
    source = Script()
    clock = Clock(source)
    source.offset += STEP_NS - 1
    assert clock.follow() == 0
    assert clock.sync() == STEP_NS - 1


def test_samples_are_not_dated_1970_if_the_system_clock_is_not_set(caplog):
    source = Script(offset=0)
    clock = Clock(source)
    source.boot = 7 * SECOND
    assert clock.to_unix_ns(source.boot) == EARLIEST_UNIX_NS + 7 * SECOND
    assert "not set" in caplog.text
    clock.sync()
    assert clock.to_unix_ns(source.boot) == EARLIEST_UNIX_NS + 7 * SECOND
    source.offset = NOW
    clock.follow()
    assert clock.to_unix_ns(0) == NOW


def test_suspending_the_host_does_not_shift_unix_time():
    source = Script()
    clock = Clock(source)
    source.boot += 3600 * SECOND  # boottime includes suspend
    assert clock.follow() == 0
