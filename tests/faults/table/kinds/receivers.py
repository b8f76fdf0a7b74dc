"""Receiver responses over HTTP and gRPC."""

from __future__ import annotations

import gzip
import json
import random
import time

import grpc
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

from tests.faults.table.receivers import GrpcReceiver, HttpReceiver, Request, accept
from tests.faults.table.scenario import Scenario

HTTP, GRPC, SPOOL = "receiver over HTTP", "receiver over gRPC", "receiver before a spool"
STATUSES = {
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    408: "Request Timeout", 413: "Content Too Large", 429: "Too Many Requests",
    500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout", 599: "(no such status)",
}  # fmt: skip
RETRY_AFTER = {
    "1": "a delay of one second", "Thu, 01 Jan 2099 00:00:00 GMT": "a delay until the year 2099",
    "-5": "a negative delay", "soon": "a malformed delay",
    "9" * 400: "a 400-digit delay", "\u00b2": "a superscript digit",
}  # fmt: skip


def count_profiles(body):
    request = service.ExportProfilesServiceRequest.FromString(body)
    return sum(len(scope.profiles) for r in request.resource_profiles for scope in r.scope_profiles)


def rejecting(count, message=""):
    answer = service.ExportProfilesServiceResponse()
    answer.partial_success.rejected_profiles = count
    answer.partial_success.error_message = message
    return answer.SerializeToString()


def status(code, **headers):
    return lambda request: request.reply(code, b"no", "text/plain", **headers)


def storing(*data, **headers):
    def answer(request):
        request.store()
        request.reply(200, *data, **headers)

    return answer


def raw(*parts, store=True, pause_s=0.0):
    def answer(request):
        if store:
            request.store()
        for part in parts:
            request.send(part)
            time.sleep(pause_s)
        request.close()

    return answer


def endless(piece, head=b"HTTP/1.1 200 OK\r\n"):
    """Returns a handler that stores a request, then keeps responding for up to ten seconds."""

    def answer(request):
        request.store()
        request.send(head)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            request.send(piece)
            time.sleep(0.001)

    return answer


def late(request):
    time.sleep(1.5)
    request.close()


def slow(request):
    time.sleep(0.4)
    request.accept()


def reject_all(request):
    request.reply(200, rejecting(count_profiles(request.body), "no profiles today"))


def reject_all_as_json(request):
    answer = {"partialSuccess": {"rejectedProfiles": str(count_profiles(request.body))}}
    request.reply(200, json.dumps(answer).encode(), "application/json")


def redirect(where, code):
    return lambda request: request.reply(code, b"", Location=where)


def at_random(*answers, seed=7):
    chance = random.Random(seed)
    return lambda request: chance.choice(answers)(request)  # noqa: PLW0108 - each time another


MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\n"
GZIPPED = gzip.compress(bytes(64 * MIB))
GOOD = (*[Request.accept] * 6, slow, storing(b"\xff" * 30))
FINAL = (status(400), reject_all)
TRANSIENT = (
    late,
    status(503),
    status(429, Retry_After="1"),
    raw(b"\0garbage\r\n\r\n", store=False),
)
LOSING = (raw(), raw(OK + b"Content-Length: 100\r\n\r\nx"))
ANSWERS = {
    "stores the batch and returns 204": lambda request: (request.store(), request.reply(204)),
    "stores the batch and closes the connection without responding": raw(),
    "stores the batch and truncates the response": raw(OK + b"Content-Length: 100\r\n\r\nx"),
    "responds after the timeout": late,
    "takes 0.4 s to handle each request": slow,
    "resets the connection": lambda request: request.close(reset=True),
    "stores the batch, then sends a response that is not HTTP": raw(b"\0garbage\r\n\r\n"),
    "returns 200 with bytes that are not protobuf": storing(b"\xff" * 30),
    "returns 200 with an HTML page": storing(b"<html>" * 1000, "text/html"),
    "returns 200 with messages nested 5,000 deep": storing(b"\x0a\x03" * 5000),
    "returns 200 with JSON nested 100,000 deep": storing(b"[" * 100_000, "application/json"),
    "returns 200 with a 5 MiB body": storing(bytes(5 * MIB)),
    "returns 200 with a gzipped 64 MiB body": storing(GZIPPED, Content_Encoding="gzip"),
    "returns 200 with malformed gzip": storing(b"\x1f\x8bxx", Content_Encoding="gzip"),
    "returns 200 in an unknown encoding": storing(b"xx", Content_Encoding="zz, br"),
    "returns 200 with an endless body": endless(b"x" * 1000, OK + b"\r\n"),
    "returns 200 with endless headers": endless(b"X-A: " + b"a" * 900 + b"\r\n"),
    "returns 200 with a malformed chunk": raw(OK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"),
    "returns 200 with a Content-Length of 2^64": raw(OK + b"Content-Length: %d\r\n\r\nx" % 2**64),
    "returns 200 with a negative Content-Length": raw(OK + b"Content-Length: -7\r\n\r\n"),
    "responds with one byte every 0.2 s": raw(*(bytes([byte]) for byte in OK), pause_s=0.2),
    "sends 100 Continue 1,000 times": raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "responds to each request twice":
        raw(2 * (OK + b"Content-Length: 0\r\n\r\n")),
    "rejects all profiles": reject_all,
    "rejects all profiles, in JSON": reject_all_as_json,
    "rejects -1 profiles": storing(rejecting(-1)),
    "rejects 2^62 profiles": lambda request: request.reply(200, rejecting(1 << 62)),
    "redirects to itself": redirect("/v1development/profiles", 307),
    "redirects to a file": redirect("file:///etc/shadow", 302),
    "responds with random errors and delays":
        at_random(*GOOD, *TRANSIENT, *FINAL),
    "stores the batch and randomly drops responses":
        at_random(*[Request.accept] * 3, *LOSING),
}  # fmt: skip


def http(name, answer, **more):
    return Scenario(HTTP, name, receiver=lambda: HttpReceiver(answer), **more)


def too_large(request):
    if len(request.body) > 20_000:
        status(413)(request)
    else:
        request.accept()


def abort(code, message="no", **details):
    def answer(receiver, request, context):
        context.abort(code, message)

    return answer


def wait_and_abort(receiver, request, context):
    detail = error_details_pb2.RetryInfo()
    detail.retry_delay.seconds = 1
    rich = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="wait")
    rich.details.add().Pack(detail)
    metadata = (("grpc-status-details-bin", rich.SerializeToString()),)
    context.set_trailing_metadata(metadata)
    context.abort(grpc.StatusCode.UNAVAILABLE, "wait")


def garbled_details(receiver, request, context):
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff" * 100),))
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "x" * 4000)


def answering(data, pause_s=0.0):
    def answer(receiver, request, context):
        time.sleep(pause_s)
        accept(receiver, request, context)
        return data

    return answer


def late_over_grpc(receiver, request, context):
    time.sleep(1.5)
    context.abort(grpc.StatusCode.UNAVAILABLE, "late")


def reject_over_grpc(receiver, request, context):
    return rejecting(count_profiles(request))


def grpc_at_random():
    chance = random.Random(7)
    answers = [accept] * 5 + [
        answering(b"", 0.3), abort(grpc.StatusCode.UNAVAILABLE), wait_and_abort,
        abort(grpc.StatusCode.INVALID_ARGUMENT), reject_over_grpc, answering(b"\xff\xff"),
    ]  # fmt: skip
    return lambda *call: chance.choice(answers)(*call)  # noqa: PLW0108 - each time another


GRPC_ANSWERS = {
    **{code.name: abort(code) for code in grpc.StatusCode if code is not grpc.StatusCode.OK},
    "RESOURCE_EXHAUSTED with garbled details": garbled_details,
    "UNAVAILABLE with RetryInfo": wait_and_abort,
    "stores the batch and responds with bytes that are not protobuf": answering(b"\xff\xff"),
    "stores the batch and responds with a 5 MiB body": answering(bytes(5 * MIB)),
    "stores the batch and responds with messages nested 5,000 deep": answering(b"\x0a\x03" * 5000),
    "responds after the timeout": late_over_grpc,
    "takes 0.4 s to handle each request": answering(b"", 0.4),
    "rejects all profiles": reject_over_grpc,
    "responds with random errors and delays": grpc_at_random(),
}  # fmt: skip

SPOOLED = (
    "responds after the timeout", "stores the batch and closes the connection without responding",
    "resets the connection",
    "rejects all profiles", "responds with random errors and delays",
    "stores the batch and randomly drops responses",
)  # fmt: skip

SCENARIOS = [
    *[http(f"{code} {text}", status(code)) for code, text in STATUSES.items()],
    *[http(f"429 with {text} in Retry-After", status(429, Retry_After=value))
      for value, text in RETRY_AFTER.items() if value.isascii()],
    *[http(name, answer) for name, answer in ANSWERS.items()],
    http("accepts requests of at most 20 kB", too_large),
    http("returns 503, and the queue holds at most two batches", status(503),
         exporter={"sending_queue": {"queue_size": 2}}),
    http("returns 503, and batches expire after a second", status(503),
         exporter={"retry_on_failure": {"max_elapsed_time": "1s"}}),
    http("returns 503 until the agent has stopped", status(503), heals=False,
         service={"shutdown_timeout": "2s"}),
    *[Scenario(SPOOL, f"{name}, over HTTP", spool=True,
               receiver=lambda name=name: HttpReceiver(ANSWERS[name])) for name in SPOOLED],
    *[Scenario(SPOOL, f"{code} over HTTP", receiver=lambda code=code: HttpReceiver(status(code)),
               spool=True) for code in (400, 503)],
    Scenario(SPOOL, "returns 503 until the agent has stopped", heals=False, spool=True,
             receiver=lambda: HttpReceiver(status(503)), service={"shutdown_timeout": "2s"}),
    Scenario(SPOOL, "responds with random errors and delays, over gRPC", spool=True,
             receiver=lambda: GrpcReceiver(grpc_at_random())),
    *[Scenario(GRPC, name, receiver=lambda answer=answer: GrpcReceiver(answer))
      for name, answer in GRPC_ANSWERS.items()],
    Scenario(GRPC, "accepts messages of at most 20 kB",
             receiver=lambda: GrpcReceiver(max_bytes=20_000)),
    Scenario(GRPC, "returns UNAVAILABLE until the agent has stopped", heals=False,
             receiver=lambda: GrpcReceiver(abort(grpc.StatusCode.UNAVAILABLE)),
             service={"shutdown_timeout": "2s"}),
]  # fmt: skip
