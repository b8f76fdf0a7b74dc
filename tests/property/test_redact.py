"""Potentially secret parts of addresses are never shown."""

import base64
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.redact import REDACTED, Secrets, has_secrets, redact_address

SECRET = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=4, max_size=20).map(
    lambda text: f"S3CR3T{text}"
)
SCHEMES = st.sampled_from(["", "http://", "https://", "grpc://", "unix:///"])


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("collector:4317", "collector:4317"),
        ("https://collector:4318/base", "https://collector:4318/base"),
        ("unix:///run/otel.sock", "unix:///run/otel.sock"),
        ("http://me:pw@host:1/x", f"http://{REDACTED}@host:1/x"),
        ("me:p://w@host:1", f"{REDACTED}@host:1"),
        ("https://host/x?key=a&b=c", f"https://host/x?{REDACTED}"),
        ("https://host/x#token", f"https://host/x?{REDACTED}"),
        ("https://me:p@w?/#@host/x?q", f"https://{REDACTED}@host/x?{REDACTED}"),
        ("", ""),
    ],
)
def test_credentials_and_query_strings_in_addresses_are_redacted(address, shown):
    assert redact_address(address) == shown
    assert has_secrets(address) == (address != shown)


@settings(deadline=None)
@given(SCHEMES, SECRET, st.sampled_from(["", "user:"]), st.booleans())
def test_passwords_and_tokens_are_never_shown(scheme, secret, user, in_query):
    address = f"{scheme}host:1/x?key={secret}" if in_query else f"{scheme}{user}{secret}@host:1/x"
    assert "S3CR3T" not in redact_address(address)


@settings(deadline=None)
@given(SECRET, SECRET, SECRET)
def test_secrets_are_redacted_in_every_encoding(password, token, header):
    quoted = quote(password, safe="")
    secrets = Secrets(
        [f"https://user:{quoted}@host/x?key={quote(token, safe='')}"],
        {"authorization": f"Bearer {header}", "short": "1"},
    )
    basic = base64.b64encode(f"user:{password}".encode()).decode()
    spellings = (password, quoted, basic, token, quote(token, safe=""), header, f"Bearer {header}")
    for spelling in spellings:
        redacted = secrets.redact(f"1 answer: {spelling}, said the receiver")
        assert redacted == f"1 answer: {REDACTED}, said the receiver"


def test_exceptions_and_their_causes_are_redacted():
    secrets = Secrets(["http://user:hunter22@host"], {})
    cause = ValueError("cannot parse http://user:hunter22@host")
    error = RuntimeError(7, cause)
    error.__cause__ = cause
    secrets.redact_error(error)
    assert "hunter22" not in repr((error, cause))
    assert error.args[0] == 7
