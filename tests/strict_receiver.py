"""A loopback OTLP receiver that rejects or drops the same data as Pyroscope and Parca.

Requests are rejected if a resource or scope attribute lacks a key or value. As in Pyroscope, other
requests are accepted, but only one of several profiles with equal labels and times is kept, frames
without a function are dropped, and profiles without ``service.name`` are unnamed. Each dropped
profile, frame or name is recorded as a complaint.
"""

import base64
import gzip
import threading
from collections import Counter

import grpc
from google.protobuf.json_format import MessageToDict

from otel_kprofiler.otlp import decode_windows, parse_payloads
from tests.servers import HttpServer, serve_grpc

EQUAL_LABELS = "profiles with equal labels and times"
NO_SERVICE = "resources without service.name"
NO_FUNCTION = "frames without a function"


def find_fault(attributes):
    """Returns why a strict receiver would reject the attributes; empty if it would not."""
    for index, attribute in enumerate(attributes):
        if not attribute.key:
            return f"attribute key at index {index} in resource attributes is empty"
        if attribute.value.WhichOneof("value") in (None, "string_value_strindex"):
            return f"attribute {attribute.key} has no value"
    return ""


def find_faults(message):
    holders = [group.resource for group in message.resource_profiles]
    holders += [
        scope.scope for group in message.resource_profiles for scope in group.scope_profiles
    ]
    return [fault for holder in holders if (fault := find_fault(holder.attributes))]


def labels_of(message):
    """Yields the identity of each profile: labels, type and time."""
    strings = message.dictionary.string_table
    for group in message.resource_profiles:
        labels = frozenset(
            (attribute.key, str(attribute.value)) for attribute in group.resource.attributes
        )
        for scope in group.scope_profiles:
            for profile in scope.profiles:
                kind = strings[profile.sample_type.type_strindex]
                yield labels, kind, profile.time_unix_nano


def find_complaints(message, seen):
    """Counts the items that the receiver would drop, by reason. Adds the label sets to ``seen``."""
    results = Counter()
    for one in labels_of(message):
        results[EQUAL_LABELS] += one in seen
        seen.add(one)
    for group in message.resource_profiles:
        keys = {attribute.key for attribute in group.resource.attributes}
        results[NO_SERVICE] += "service.name" not in keys
    functions = message.dictionary.function_table
    for location in message.dictionary.location_table[1:]:
        named = [functions[line.function_index].name_strindex for line in location.lines]
        results[NO_FUNCTION] += not any(named)
    return +results


def as_collector_json(message):
    """Returns a request as parsed JSON, with ids as hexadecimal text."""
    tree = MessageToDict(message)
    for link in tree["dictionary"]["linkTable"]:
        for name in {"traceId", "spanId"} & link.keys():
            link[name] = base64.b64decode(link[name]).hex()
    return tree


class StrictReceiver:
    """A strict OTLP receiver for gRPC and HTTP on loopback.

    Attributes:
        accepted: the accepted requests, by content type, or ``grpc`` for gRPC.
        refused: the reasons for rejected requests.
        complaints: counts of silently dropped items, by ``grpc`` or content type, and reason.
    """

    def __init__(self):
        self.accepted, self.refused, self.complaints = {}, [], {}
        self._seen, self._lock = {}, threading.Lock()
        self._grpc, port = serve_grpc(self._export)
        self.grpc = f"127.0.0.1:{port}"
        self._http = HttpServer(self._answer)
        self.http = self._http.url

    def _answer(self, request):
        body, kind = request.body, request.headers["Content-Type"]
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        status = 400 if self.take(kind, body) else 200
        request.reply(status, b"{}" if kind == "application/json" else b"", Content_Type=kind)

    def take(self, kind, payload):
        (parsed,) = parse_payloads(payload)
        faults = find_faults(parsed.message)
        with self._lock:
            self.refused += faults
            if not faults:
                self.accepted.setdefault(kind, []).append(payload)
                complaints = self.complaints.setdefault(kind, Counter())
                complaints += find_complaints(parsed.message, self._seen.setdefault(kind, set()))
        return faults

    def _export(self, request, context):
        if faults := self.take("grpc", request):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, faults[0])
        return b""

    def requests(self, kind):
        return [
            as_collector_json(parsed.message)
            for payload in self.accepted.get(kind, ())
            for parsed in parse_payloads(payload)
        ]

    def samples(self, kind):
        return sum(
            window.sample_count
            for payload in self.accepted.get(kind, ())
            for window in decode_windows(payload)
        )

    def close(self):
        self._grpc.stop(0).wait()
        self._http.close()
