"""Answers of receivers over HTTP and gRPC."""

from __future__ import annotations

import time

import grpc

from tests.faults.table.receivers import GrpcReceiver, HttpReceiver
from tests.faults.table.scenario import Scenario

TRANSIENT = {429: "Too Many Requests", 502: "Bad Gateway", 503: "Service Unavailable",
             504: "Gateway Timeout"}  # fmt: skip
FINAL = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
         500: "Internal Server Error", 501: "Not Implemented"}  # fmt: skip


def http(answer):
    return lambda: HttpReceiver(answer)


def status(code, **headers):
    return http(lambda request: request.reply(code, b"no", "text/plain", **headers))


def lose_the_answer(request):
    request.store()
    request.close()


def cut_the_answer(request):
    request.store()
    request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
    request.close()


def hang(request):
    time.sleep(1.5)
    request.close()


HTTP = [
    Scenario("receiver over HTTP", f"{code} {text}", receiver=status(code))
    for code, text in {**TRANSIENT, **FINAL}.items()
] + [
    Scenario("receiver over HTTP", name, receiver=http(answer))
    for name, answer in {
        "stores the request and closes without an answer": lose_the_answer,
        "stores the request and cuts the answer": cut_the_answer,
        "answers after the timeout": hang,
        "resets the connection": lambda request: request.close(reset=True),
        "answers without HTTP": lambda request: request.send(b"\0garbage\r\n\r\n"),
        "stores, and answers 200 with bytes that are no protobuf":
            lambda request: (request.store(), request.reply(200, b"\xff" * 30)),
    }.items()
]  # fmt: skip


def grpc_status(code):
    def answer(receiver, request, context):
        context.abort(code, "no")

    return lambda: GrpcReceiver(answer)


GRPC = [
    Scenario("receiver over gRPC", code.name, receiver=grpc_status(code))
    for code in grpc.StatusCode
    if code is not grpc.StatusCode.OK
]

SCENARIOS = [*HTTP, *GRPC]
