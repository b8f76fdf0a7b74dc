"""An OTLP receiver on loopback that refuses and drops what Pyroscope and Parca do.

It refuses attributes of resources and scopes without key or value. Like Pyroscope it takes the
rest, but keeps one of several profiles with equal labels and times, drops frames without a
function, and has no name for what has no ``service.name``; each of these is a complaint.
"""

import base64
import gzip
import http.server
import threading
from collections import Counter
from concurrent import futures

import grpc
from google.protobuf.json_format import MessageToDict

from otel_kprofiler.otlp import decode_windows, parse_payloads

SERVICE = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"
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
    """Counts of what the receiver drops from requests, by kind.

    Args:
        message: the request.
        seen: what :func:`labels_of` said of earlier requests; gets more.
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
        complaints: what it dropped silently, by kind of request.
    """

    def __init__(self):
        self.accepted, self.refused, self.complaints = {}, [], {}
        self._seen, self._lock = {}, threading.Lock()
        options = (("grpc.so_reuseport", 0),)
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2), options=options)
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._grpc.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})]
        )
        self.grpc = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                kind = self.headers["Content-Type"]
                status = 400 if receiver.take(kind, body) else 200
                self.send_response(status)
                self.send_header("Content-Type", kind)
                answer = b"{}" if kind == "application/json" else b""
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.http = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, kind, payload):
        """Take a request; returns the reasons to refuse it."""
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
        self._http.shutdown()
        self._http.server_close()
