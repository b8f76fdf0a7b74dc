"""An OTLP receiver on loopback that rejects and drops what Pyroscope and Parca do.

It rejects resource and scope attributes without key or value. Like Pyroscope it accepts the
rest, but keeps one of several profiles with equal labels and times, drops frames without a
function, and has no name for profiles without ``service.name``; each of these is a complaint.
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
    """Why a strict receiver rejects attributes; empty if it accepts them."""
    for index, attribute in enumerate(attributes):
        if not attribute.key:
            return f"attribute key at index {index} in resource attributes is empty"
        if attribute.value.WhichOneof("value") in (None, "string_value_strindex"):
            return f"attribute {attribute.key} has no value"
    return ""


def find_faults(message):
    """All reasons to reject a request."""
    holders = [group.resource for group in message.resource_profiles]
    holders += [
        scope.scope for group in message.resource_profiles for scope in group.scope_profiles
    ]
    return [fault for holder in holders if (fault := find_fault(holder.attributes))]


def labels_of(message):
    """Returns the identity of each profile: labels, type and time."""
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
    """Counts of items the receiver drops from requests, by kind.

    Args:
        message: the request.
        seen: results of :func:`labels_of` for earlier requests; new ones are added.
    """
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
    """A request as parsed JSON, ids as text of hexadecimal digits."""
    tree = MessageToDict(message)
    for link in tree["dictionary"]["linkTable"]:
        for name in {"traceId", "spanId"} & link.keys():
            link[name] = base64.b64decode(link[name]).hex()
    return tree


class StrictReceiver:
    """OTLP over gRPC and HTTP on loopback.

    Attributes:
        accepted: requests, by ``grpc`` or the content type.
        refused: reasons.
        complaints: items dropped silently, by kind of request.
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
        answer = b"{}" if kind == "application/json" else b""
        request.reply(status, answer, Content_Type=kind)

    def take(self, kind, payload):
        """Receive a request; returns the reasons to reject it."""
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
        """Accepted requests as parsed JSON."""
        return [
            as_collector_json(parsed.message)
            for payload in self.accepted.get(kind, ())
            for parsed in parse_payloads(payload)
        ]

    def samples(self, kind):
        """Number of accepted samples."""
        return sum(
            window.sample_count
            for payload in self.accepted.get(kind, ())
            for window in decode_windows(payload)
        )

    def close(self):
        """Stop listening."""
        self._grpc.stop(0).wait()
        self._http.close()
