"""Text is escaped for files and terminals; counts, errors and statuses become readable text."""

import os

import pytest

from otel_kprofiler.errors import describe_error, describe_status
from otel_kprofiler.text import describe_count, escape_controls, escape_surrogates


@pytest.mark.parametrize(
    ("text", "encodable", "printable"),
    [
        ("plain name", "plain name", "plain name"),
        ("größe 火", "größe 火", "größe 火"),
        ("a\udcff\ud800", "a\\xff\\ud800", "a\\xff\\ud800"),
        ("\x1b[31m", "\x1b[31m", "\\x1b[31m"),
        ("\x9b\x7f\t\n", "\x9b\x7f\t\n", "\\x9b\\x7f\\t\\n"),
        ("\u202eevil\u2028", "\u202eevil\u2028", "\\u202eevil\\u2028"),
    ],
)
def test_characters_that_cannot_be_encoded_or_printed_are_escaped(text, encodable, printable):
    assert escape_surrogates(text) == encodable
    assert escape_controls(text) == printable


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 samples and 0 processes"),
        (1, "1 sample and 1 process"),
        (2000, "2,000 samples and 2,000 processes"),
    ],
)
def test_a_count_of_one_takes_a_singular_noun(count, words):
    processes = describe_count(count, "process", "processes")
    assert f"{describe_count(count, 'sample')} and {processes}" == words


def test_system_errors_are_shown_without_errno():
    with pytest.raises(FileNotFoundError) as raised:
        os.stat("/none/x")
    assert describe_error(raised.value) == "/none/x: No such file or directory"
    assert describe_error(OSError(1, "Operation not permitted")) == "Operation not permitted"
    assert describe_error(OSError("text alone")) == "text alone"
    assert describe_error(ValueError("a value")) == "a value"


def test_exit_statuses_are_described_by_the_name_of_their_signal():
    assert describe_status(2) == "status 2"
    assert describe_status(-9) == "SIGKILL"
    assert describe_status(-40) == "signal 40"
