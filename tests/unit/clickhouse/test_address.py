"""Table addresses are parsed, and shown without secrets."""

import pytest

from otel_kprofiler.clickhouse import parse_address
from otel_kprofiler.errors import KProfilerError


def test_clickhouse_addresses_are_parsed():
    address = parse_address(
        "clickhouse://me:p%40ss@db.example:18123/otel?table=mine&service.version=1.2&host.name=a",
        {"CLICKHOUSE_USER": "not me"},
    )
    assert (address.host, address.port, address.secure) == ("db.example", 18123, False)
    assert (address.database, address.table) == ("otel", "mine")
    assert (address.user, address.password) == ("me", "p@ss")
    assert address.attributes == ("service.version=1.2", "host.name=a")
    assert address.label == "otel service.version=1.2 host.name=a"


def test_defaults_come_from_the_exporter_and_the_environment():
    result = parse_address("clickhouse://[::1]", {})
    assert (result.host, result.port, result.user, result.password) == ("::1", 8123, "default", "")
    assert (result.database, result.table) == ("default", "otel_profiles")
    assert result.place == "clickhouse://[::1]:8123/default"
    result = parse_address(
        "clickhouse://db/otel?secure=true",
        {"CLICKHOUSE_USER": "reader", "CLICKHOUSE_PASSWORD": "s3cret"},
    )
    assert (result.port, result.secure) == (8443, True)
    assert (result.user, result.password) == ("reader", "s3cret")


def test_secrets_are_not_shown():
    result = parse_address("clickhouse://me:s3cret-word@db/otel", {})
    assert "s3cret" not in repr(result) + result.place + result.label
    assert (
        result.secrets.redact("failed for me with s3cret-word") == "failed for me with [REDACTED]"
    )
    result = parse_address("clickhouse://db/otel", {"CLICKHOUSE_PASSWORD": "s3cret-word"})
    assert "s3cret" not in result.secrets.redact("failed with s3cret-word")


@pytest.mark.parametrize(
    "address",
    [
        "clickhouse://",
        "clickhouse:///otel",
        "clickhouse://me:s3cret@host:port/otel",
        "clickhouse://me:s3cret@host/otel/table",
        "clickhouse://host/otel?tabel=x",
        "clickhouse://host/otel?secure=maybe",
        "clickhouse://host/otel?table=",
        "clickhouse://host/otel?service.version",
        "clickhouse://host/\udcff",
        "clickhouse://host/%ff",
    ],
)
def test_an_invalid_address_is_rejected_with_an_example(address):
    with pytest.raises(KProfilerError, match="is not a ClickHouse address") as raised:
        parse_address(address, {})
    assert "s3cret" not in str(raised.value)
    assert "clickhouse://USER:PASSWORD@HOST:8123/DATABASE" in raised.value.hint
