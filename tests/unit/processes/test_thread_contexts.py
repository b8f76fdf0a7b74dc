"""Thread context attributes are given the names that their process publishes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_kprofiler.bpf import ContextKind
from otel_kprofiler.model import MAX_LABEL_VALUE_CHARS, MAX_LABELS, SpanLink
from otel_kprofiler.otlp import LOCAL_ROOT
from otel_kprofiler.processes.thread_contexts import (
    KEY_MAP,
    NODEJS_SCHEMA,
    SCHEMA,
    V8_LAYOUT,
    WRAP_OFFSET,
    decode_context,
    find_variable,
    name_root,
    read_key_map,
)
from otel_kprofiler.processes.thread_pointer import NODEJS_VARIABLE, VARIABLE

NAMES = ("route", "method", "user")


def schema(names):
    return {SCHEMA: "tls_v1", KEY_MAP: names}


def entry(number, value):
    return bytes((number, len(value))) + value


def decode(*entries, names=NAMES, flags=1, has_span=True):
    return dict(decode_context(bytes((1, flags)) + b"".join(entries), names, has_span=has_span))


def test_attribute_indices_are_resolved_to_names():
    labels = decode(entry(1, b"GET"), entry(0, "/käse".encode()))
    assert labels == {"method": "GET", "route": "/käse", "trace_flags": "01"}


def test_samples_without_a_span_have_no_trace_flags():
    assert decode(entry(1, b"GET"), has_span=False) == {"method": "GET"}


def test_the_last_of_several_duplicate_keys_is_used():
    assert decode(entry(1, b"GET"), entry(1, b"PUT"))["method"] == "PUT"


def test_attribute_indices_without_a_name_are_skipped():
    assert decode(entry(3, b"?"), entry(255, b"?"), entry(2, b"me")) == {
        "user": "me", "trace_flags": "01",
    }  # fmt: skip


def test_a_truncated_attribute_ends_parsing():
    assert decode(entry(0, b"/"), b"\1\4GET") == {"route": "/", "trace_flags": "01"}
    assert decode(entry(0, b"/"), b"\1") == {"route": "/", "trace_flags": "01"}


def test_bytes_that_are_not_utf8_are_replaced():
    assert decode(entry(0, b"\xff/"))["route"] == "\ufffd/"


def test_attributes_have_the_same_limits_as_labels():
    names = tuple(map(str, range(20)))
    labels = decode(*[entry(number, b"x" * 255) for number in range(20)], names=names)
    assert len(labels) == MAX_LABELS + 1
    assert {len(value) for name, value in labels.items() if name != "trace_flags"} == {
        MAX_LABEL_VALUE_CHARS
    }
    again = decode(*[entry(number, b"") for number in range(20)], entry(3, b"new"), names=names)
    assert again["3"] == "new"


def test_the_local_root_name_does_not_count_toward_the_label_limit():
    names = (*map(str, range(20)), LOCAL_ROOT)
    entries = [entry(number, b"x") for number in range(20)]
    labels = decode(*entries, entry(20, b"GET /"), names=read_key_map(schema(names)))
    assert labels.pop(LOCAL_ROOT) == "GET /"
    assert len(labels) == MAX_LABELS + 1


@pytest.mark.parametrize(
    ("labels", "root"),
    [
        ({}, ""),
        ({"http.request.method": "GET"}, ""),
        ({"http.route": "/orders"}, "/orders"),
        ({"http.request.method": "GET", "http.route": "/orders"}, "GET /orders"),
        ({"http.method": "_OTHER", "http.route": "/orders"}, "HTTP /orders"),
        ({"http.route": "/" * 200, "http.request.method": "GET"}, "GET " + "/" * 196),
        ({"http.route": "/orders", LOCAL_ROOT: "checkout"}, "checkout"),
    ],
)
def test_the_local_root_name_is_taken_from_its_attribute_or_the_http_route(labels, root):
    link = SpanLink(b"\1" * 16, b"\2" * 8)
    kept = tuple((name, value) for name, value in labels.items() if name != LOCAL_ROOT)
    assert name_root(link, tuple(labels.items())) == (link._replace(local_root=root), kept)
    assert name_root(None, tuple(labels.items())) == (None, kept)


def name_labels(*labels, has_span=True):
    encoded = b"".join([bytes((len(name), len(value))) + name + value for name, value in labels])
    return dict(decode_context(b"\2\0" + encoded, (), has_span=has_span))


def test_goroutine_labels_are_decoded_with_their_names():
    ids = ((b"trace_id", b"1" * 32), (b"span_id", b"2" * 16))
    labels = ((b"user", "käse".encode()), (b"empty", b""), *ids)
    assert name_labels(*labels) == {"user": "käse", "empty": ""}
    assert name_labels(*labels, has_span=False).keys() == {"user", "empty", "trace_id", "span_id"}


def test_goroutine_labels_have_the_same_limits_as_attributes():
    many = [(f"label{number:02}".encode(), b"v" * 250) for number in range(20)]
    labels = name_labels((b"otel_kprofiler.x", b"x"), (b"thread.id", b"1"), (b"", b"x"), *many)
    assert labels == {f"label{number:02}": "v" * 200 for number in range(16)}


@given(st.binary(max_size=700), st.booleans())
def test_arbitrary_goroutine_labels_are_decoded_within_the_limits(encoded, has_span):
    labels = decode_context(b"\2\0" + encoded, (), has_span=has_span)
    assert len(labels) <= 16
    assert list(labels) == sorted(labels)


@given(st.binary(min_size=1, max_size=700), st.booleans())
@example(b"\0" * 700, True)
def test_arbitrary_thread_contexts_are_decoded_within_the_limits(context, has_span):
    labels = decode_context(b"\1" + context, ("a", "b", "") * 80, has_span=has_span)
    assert len(labels) <= 3
    assert list(labels) == sorted(labels)


def test_the_key_map_of_a_thread_context_is_ignored_if_the_schema_is_unsupported():
    assert read_key_map({SCHEMA: "tlsdesc_v1_dev", KEY_MAP: NAMES}) == NAMES
    assert read_key_map({SCHEMA: "tls_v1", KEY_MAP: NAMES}) == NAMES
    assert read_key_map({SCHEMA: "tls_v1"}) == ()
    assert read_key_map({SCHEMA: "nodejs_v1_dev", KEY_MAP: NAMES}) == NAMES
    assert read_key_map({SCHEMA: "go_pprof_labels_v1", KEY_MAP: NAMES}) is None
    assert read_key_map({KEY_MAP: NAMES}) is None


def test_reserved_and_invalid_names_are_skipped():
    given_names = ("thread.id", "otel_kprofiler.x", "trace_flags", 7, "n" * 101, "n" * 100)
    assert read_key_map({SCHEMA: "tls_v1", KEY_MAP: given_names}) == ("", "", "", "", "", "n" * 100)


def test_a_key_map_has_at_most_256_names():
    labels = read_key_map({SCHEMA: "tls_v1", KEY_MAP: tuple(map(str, range(300)))})
    assert labels == tuple(map(str, range(256)))
    assert read_key_map({SCHEMA: "tls_v1", KEY_MAP: "route"}) == ()


NODEJS = {SCHEMA: NODEJS_SCHEMA, KEY_MAP: ("route",)}


def test_the_context_variable_is_selected_by_schema_version_and_v8_layout():
    assert find_variable({SCHEMA: "tls_v1"}) == (VARIABLE, ContextKind.POINTER, 0)
    assert find_variable(NODEJS) == (NODEJS_VARIABLE, ContextKind.IN_V8, 0)
    layout = {name: values[-1] for name, values in V8_LAYOUT.items()}
    assert find_variable({**NODEJS, **layout, WRAP_OFFSET: 24}) == (
        NODEJS_VARIABLE, ContextKind.WRAPPED_IN_V8, 24,
    )  # fmt: skip


@pytest.mark.parametrize("name", V8_LAYOUT)
def test_contexts_are_not_read_if_the_v8_layout_is_unsupported(name):
    assert find_variable({**NODEJS, name: 4}) is None


@pytest.mark.parametrize("offset", [-1, 1 << 20, "24"])
def test_contexts_at_an_out_of_range_offset_are_not_read(offset):
    assert find_variable({**NODEJS, WRAP_OFFSET: offset}) is None
