"""The first signal ends a recording, and the second terminates the command immediately."""

import os
import signal

import pytest

from otel_kprofiler.cli.end_signals import EndSignals

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_recorded_and_announced(number):
    announced = []
    with EndSignals() as signals:
        signals.listen(lambda: announced.append(True))
        send(number)
        assert signals.received is number
    assert announced == [True]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_sampling_ends_the_command_with_a_message_and_status(number, capsys):
    with pytest.raises(SystemExit) as ended, EndSignals():
        send(number)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == (
        f"ended by {number.name} before sampling began: nothing was recorded\n"
    )


def test_a_second_signal_terminates_the_command_immediately():
    with EndSignals() as signals:
        signals.listen(lambda: None)
        send(signal.SIGINT)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signals.received is signal.SIGINT


def test_previous_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with EndSignals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
