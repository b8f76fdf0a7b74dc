"""Service names are read from process environments."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.host import Access
from otel_kprofiler.processes.service_variables import parse_environment, read_environment

pytestmark = pytest.mark.system


def environ(**variables):
    return b"".join(f"{key}={value}\0".encode() for key, value in variables.items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", {}),
        (environ(PATH="/bin", OTEL_SERVICE_NAME="shop"), {"service.name": "shop"}),
        (environ(MY_OTEL_SERVICE_NAME="x"), {}),
        (environ(OTEL_SERVICE_NAME=""), {}),
        (
            environ(
                OTEL_RESOURCE_ATTRIBUTES="service.name=a%20b, service.version = 1,"
                "deployment.environment.name=dev,k8s.pod.uid=forged,team=x"
            ),
            {"service.name": "a b", "service.version": "1", "deployment.environment.name": "dev"},
        ),
        (
            environ(OTEL_RESOURCE_ATTRIBUTES="service.name=a", OTEL_SERVICE_NAME="b"),
            {"service.name": "b"},
        ),
        # the whole variable is ignored
        (environ(OTEL_RESOURCE_ATTRIBUTES="service.name=a,b"), {}),
        (environ(OTEL_RESOURCE_ATTRIBUTES="service.name=a,=b"), {}),
        (environ(OTEL_RESOURCE_ATTRIBUTES="service.name=%ff"), {}),
        (environ(OTEL_RESOURCE_ATTRIBUTES="service.name=" + "x" * 20_000), {}),
        # getenv(3) returns the first match
        (b"OTEL_SERVICE_NAME=a\0OTEL_SERVICE_NAME=b\0", {"service.name": "a"}),
        (b"OTEL_SERVICE_NAME=\xff\0", {"service.name": "\\xff"}),
    ],
)
def test_the_service_name_matches_that_of_the_opentelemetry_sdks(text, expected):
    assert parse_environment(text) == expected


@given(st.binary())
def test_arbitrary_environment_bytes_are_parsed(rest):
    environment = parse_environment(b"OTEL_RESOURCE_ATTRIBUTES=" + rest)
    assert all(key.startswith(("service.", "deployment.")) for key in environment)


def test_the_environment_of_a_running_process_is_read():
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "OTEL_SERVICE_NAME": "shop"},
    ) as process:  # fmt: skip
        process.stdout.readline()
        assert read_environment(Access(), process.pid)["service.name"] == "shop"
        process.communicate()
    assert read_environment(Access(), process.pid) == {}
