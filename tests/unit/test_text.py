"""Untrusted names in files and on terminals."""

import pytest

from otel_kprofiler.text import escape_controls, escape_surrogates


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
