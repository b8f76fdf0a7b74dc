"""Whatever the value of a key, the configuration is either valid or refused with a ConfigError."""

import contextlib
import json

import pytest

from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import parse_config
from otel_kprofiler.config.config import Config
from otel_kprofiler.config.exporter_types import EXPORTERS
from otel_kprofiler.config.load import section_of
from otel_kprofiler.config.section import keys_of
from otel_kprofiler.errors import ConfigError


def walk(section, path=()):
    for key, field in keys_of(section).items():
        yield (*path, key)
        if inner := section_of(field):
            yield from walk(inner, (*path, key))


KEYS = [
    *(path for path in walk(Config) if path[0] != "exporters"),
    *(("exporters", name, *path) for name, kind in EXPORTERS.items() for path in walk(kind)),
]


def make_text(path, value):
    document = {
        "receivers": {"kprofiler": {}},
        "exporters": {
            "otlp_grpc": {"endpoint": "h:1"},
            "otlp_http": {"endpoint": "http://h:1"},
            "file": {"path": "x"},
            "debug": {},
        },
        "service": {"pipelines": {"profiles": {"receivers": ["kprofiler"], "exporters": ["file"]}}},
    }
    section = document
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize("value", [5, [{}], {"a": [1]}, "\x00"], ids=str)
def test_a_value_of_any_type_is_accepted_or_refused(value):
    assert len(KEYS) > 100
    for path in KEYS:
        with contextlib.suppress(ConfigError):
            agent_config(parse_config(make_text(path, value), path="a", environ={}).config)
