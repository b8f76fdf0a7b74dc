"""OTEL_EXPORTER_OTLP_PROFILES_* variables override OTEL_EXPORTER_OTLP_* and defaults."""

import pytest

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.export import (
    ClientSettings,
    OtlpGrpcExporter,
    OtlpHttpExporter,
    RetryPolicy,
    Tls,
    exporter_from_environment,
    read_settings,
)
from otel_kprofiler.model import Form

GENERAL = {
    "ENDPOINT": "http://general:1",
    "PROTOCOL": "http/json",
    "HEADERS": "a=1, B = two%20words ,c=x=y",
    "TIMEOUT": "2.5",
    "COMPRESSION": "GZIP",
    "INSECURE": "TRUE",
    "CERTIFICATE": "/ca",
    "CLIENT_KEY": "/key",
    "CLIENT_CERTIFICATE": "/pem",
}
SIGNAL = {
    "ENDPOINT": "http://signal:2/own/path",
    "PROTOCOL": "http/protobuf",
    "HEADERS": "d=4",
    "TIMEOUT": "7",
    "COMPRESSION": "none",
    "INSECURE": "false",
    "CERTIFICATE": "/ca2",
    "CLIENT_KEY": "/key2",
    "CLIENT_CERTIFICATE": "/pem2",
}


def environ(values, prefix="OTEL_EXPORTER_OTLP_"):
    return {prefix + name: value for name, value in values.items()}


def signal(values):
    return environ(values, "OTEL_EXPORTER_OTLP_PROFILES_")


def test_defaults_apply_if_no_environment_variables_are_set():
    assert read_settings({}) == ClientSettings(
        compression="none", retry=RetryPolicy(max_elapsed_time_s=10)
    )


def test_all_general_exporter_variables_are_read():
    assert read_settings(environ(GENERAL)) == ClientSettings(
        protocol="http/json",
        endpoint="http://general:1",
        headers={"a": "1", "b": "two words", "c": "x=y"},
        timeout_s=2.5,
        retry=RetryPolicy(max_elapsed_time_s=2.5),
        compression="gzip",
        tls=Tls(True, "/ca", "/pem", "/key"),
    )


@pytest.mark.parametrize("option", SIGNAL)
def test_signal_variables_take_precedence_over_general_variables(option):
    both = read_settings(environ(GENERAL) | signal({option: SIGNAL[option]}))
    expected = read_settings(environ(GENERAL | {option: SIGNAL[option]}))
    assert both == expected or option == "ENDPOINT"
    assert (both.endpoint, both.exact) == (
        (SIGNAL["ENDPOINT"], True) if option == "ENDPOINT" else (GENERAL["ENDPOINT"], False)
    )


def test_an_empty_variable_counts_as_unset():
    assert read_settings(environ(GENERAL) | signal(dict.fromkeys(SIGNAL, " "))) == read_settings(
        environ(GENERAL)
    )


def test_all_invalid_variables_are_reported_together_without_exposing_secrets():
    wrong = {"PROTOCOL": "http", "TIMEOUT": "10s", "COMPRESSION": "zstd"}
    wrong |= {"INSECURE": "yes", "HEADERS": "secret"}
    with pytest.raises(ConfigError) as caught:
        read_settings(environ(wrong) | signal({"TIMEOUT": "-1"}))
    keys = {problem.key.removeprefix("OTEL_EXPORTER_OTLP_") for problem in caught.value.problems}
    assert keys == {"PROTOCOL", "PROFILES_TIMEOUT", "COMPRESSION", "INSECURE", "HEADERS"}
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(read_settings(environ({"HEADERS": "a=secret"})))


PATH = "/v1development/profiles"


GRPC = OtlpGrpcExporter, Form.PROTOBUF
HTTP = OtlpHttpExporter, Form.PROTOBUF
HTTP_JSON = OtlpHttpExporter, Form.JSON
JSON = {"PROTOCOL": "http/json"}


@pytest.mark.parametrize(
    ("address", "variables", "kind_and_form", "endpoint"),
    [
        (None, {}, GRPC, "localhost:4317"),
        (None, environ({"PROTOCOL": "http/protobuf"}), HTTP, "http://localhost:4318" + PATH),
        (
            None,
            environ({**JSON, "ENDPOINT": "https://h/base/"}),
            HTTP_JSON,
            "https://h/base" + PATH,
        ),
        (None, environ(JSON) | signal({"ENDPOINT": "https://h/own"}), HTTP_JSON, "https://h/own"),
        ("grpc://h:1", environ({**GENERAL, "CLIENT_KEY": ""}), GRPC, "h:1"),
        ("grpcs://h:1", {}, GRPC, "h:1"),
        ("http://h:1", {}, HTTP, "http://h:1" + PATH),
        ("http://h:1" + PATH, environ(JSON), HTTP_JSON, "http://h:1" + PATH),
    ],
)
def test_the_address_and_variables_select_the_exporter(address, variables, kind_and_form, endpoint):
    exporter = exporter_from_environment(address, variables)
    assert ((type(exporter), exporter.form), exporter.endpoint) == (kind_and_form, endpoint)
    exporter.shutdown(0)


def test_an_unsupported_address_is_rejected():
    with pytest.raises(ConfigError) as caught:
        exporter_from_environment("collector:4317", {})
    assert "grpc://" in caught.value.hint
