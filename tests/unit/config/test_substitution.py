"""Environment variable substitution follows the table in the specification."""

import pytest

from otel_kprofiler.config.document import parse_document

ENVIRON = {
    "STRING_VALUE": "value",
    "BOOL_VALUE": "true",
    "INT_VALUE": "1",
    "FLOAT_VALUE": "1.1",
    "HEX_VALUE": "0xdeadbeef",
    "INVALID_MAP_VALUE": "value\nkey:value",
    "DO_NOT_REPLACE_ME": "Never use this value",
    "REPLACE_ME": "${DO_NOT_REPLACE_ME}",
    "VALUE_WITH_ESCAPE": "value$$",
    "EMPTY": "",
}


def read(text):
    document = parse_document(f"key: {text}", path="t.yaml", environ=ENVIRON)
    assert not document.problems
    return document.values["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${STRING_VALUE}", "value"),
        ("${BOOL_VALUE}", True),
        ("${INT_VALUE}", 1),
        ("${FLOAT_VALUE}", 1.1),
        ("${HEX_VALUE}", 3735928559),
        ('"${STRING_VALUE}"', "value"),
        ('"${BOOL_VALUE}"', "true"),
        ('"${INT_VALUE}"', "1"),
        ('"${FLOAT_VALUE}"', "1.1"),
        ('"${HEX_VALUE}"', "0xdeadbeef"),
        ("${env:STRING_VALUE}", "value"),
        ("${INVALID_MAP_VALUE}", "value\nkey:value"),
        ("foo ${STRING_VALUE} ${FLOAT_VALUE}", "foo value 1.1"),
        ("${UNDEFINED_KEY}", None),
        ("${UNDEFINED_KEY:-fallback}", "fallback"),
        ("${EMPTY:-fallback}", "fallback"),
        ("${UNDEFINED_KEY:-}", None),
        ("${REPLACE_ME}", "${DO_NOT_REPLACE_ME}"),
        ("${UNDEFINED_KEY:-${STRING_VALUE}}", "${STRING_VALUE}"),
        ("$${STRING_VALUE}", "${STRING_VALUE}"),
        ("$$${STRING_VALUE}", "$value"),
        ("$$$${STRING_VALUE}", "$${STRING_VALUE}"),
        ("$${STRING_VALUE:-fallback}", "${STRING_VALUE:-fallback}"),
        ("$${STRING_VALUE:-${STRING_VALUE}}", "${STRING_VALUE:-value}"),
        ("${UNDEFINED_KEY:-$${UNDEFINED_KEY}}", "${UNDEFINED_KEY:-${UNDEFINED_KEY}}"),
        ("${VALUE_WITH_ESCAPE}", "value$$"),
        ("a $$ b", "a $ b"),
        ("a $ b", "a $ b"),
    ],
)
def test_substitution_follows_the_specification(text, value):
    result = read(text)
    assert result == value
    assert type(result) is type(value)


def test_variables_in_keys_are_not_substituted():
    document = parse_document("${STRING_VALUE}: 1", path="t", environ=ENVIRON)
    assert document.values == {"${STRING_VALUE}": 1}


@pytest.mark.parametrize(
    "text", ["${STRING_VALUE:?error}", "${1BAD}", "${file:/etc/passwd}", "${}"]
)
def test_malformed_references_are_errors(text):
    document = parse_document(f"a: 1\nkey: {text}", path="t.yaml", environ=ENVIRON)
    [problem] = document.problems
    assert (problem.line, problem.column, problem.key) == (2, 6, "key")
    assert f"invalid reference ({len(text)} characters)" in problem.message
    assert text not in problem.message
    assert document.values["key"] is None
