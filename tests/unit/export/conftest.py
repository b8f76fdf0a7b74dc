"""Scripted receivers on the loopback interface."""

import itertools
import shutil
import subprocess
from collections import deque
from contextlib import closing
from types import SimpleNamespace

import pytest
from google.rpc.status_pb2 import Status

from otel_kprofiler.export import RetryPolicy
from otel_kprofiler.model import Batch, Form, ProfileSamples
from tests.servers import HttpServer, serve_grpc


def make_batch(payload=b"payload", samples=(3,), form=Form.PROTOBUF):
    profiles = tuple(ProfileSamples("on_cpu", count) for count in samples)
    return Batch(payload, form, profiles, 1_700_000_000_000_000_000, 1_700_000_005_000_000_000)


@pytest.fixture
def batch():
    return make_batch


@pytest.fixture
def quick():
    return RetryPolicy(initial_interval_s=0.01, max_interval_s=0.05, max_elapsed_time_s=10)


@pytest.fixture
def fast_clock(monkeypatch):
    """Ends retries after a few attempts: the policy's clock advances by 5 s with each call."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 5).__next__)
    monkeypatch.setattr("otel_kprofiler.export.retry.time", clock)


@pytest.fixture
def status_details():
    def make(*messages):
        status = Status(code=8, message="no")
        for message in messages:
            status.details.add().Pack(message)
        return status.SerializeToString()

    return make


class Receiver:
    """A receiver that records requests, and replays scripted responses, repeating the last one."""

    def __init__(self):
        self.script = deque()
        self.requests = []

    def answer(self, *answers):
        self.script.extend(answers)

    def next_answer(self, default):
        if not self.script:
            return default
        return self.script.popleft() if len(self.script) > 1 else self.script[0]


class GrpcReceiver(Receiver):
    """A gRPC receiver whose responses are bytes, or functions of (request, context)."""

    def __init__(self, credentials=None):
        super().__init__()
        self.server, self.port = serve_grpc(
            self.handle,
            credentials=credentials,
            max_bytes=64 << 20,
        )
        self.endpoint = f"{'localhost' if credentials else '127.0.0.1'}:{self.port}"

    def handle(self, request, context):
        self.requests.append((request, dict(context.invocation_metadata())))
        answer = self.next_answer(b"")
        return answer(request, context) if callable(answer) else answer

    def close(self):
        self.server.stop(0).wait()


class HttpReceiver(Receiver):
    """An HTTP receiver that responds with (status, headers, body), or by calling a function."""

    def __init__(self, context=None):
        super().__init__()
        self.server = HttpServer(self.handle, context)
        self.port, self.endpoint, self.close = self.server.port, self.server.url, self.server.close

    def handle(self, request):
        self.requests.append((request.path, request.headers, request.body))
        answer = self.next_answer((200, {}, b""))
        if callable(answer):
            request.close_connection = True
            answer(request)
            return
        status, headers, content = answer
        request.reply(status, content, **{name.replace("-", "_"): v for name, v in headers.items()})


@pytest.fixture
def grpc_receiver():
    with closing(GrpcReceiver()) as receiver:
        yield receiver


@pytest.fixture
def http_receiver():
    with closing(HttpReceiver()) as receiver:
        yield receiver


@pytest.fixture
def open_grpc_receiver():
    return lambda credentials: closing(GrpcReceiver(credentials))


@pytest.fixture
def open_http_receiver():
    return lambda context: closing(HttpReceiver(context))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Creates certificates and keys named ca, server, client and stranger, using openssl."""
    if not shutil.which("openssl"):
        pytest.skip("needs the openssl command to create certificates")
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for ca in ("ca", "stranger"):
        openssl(
            *("req", "-x509", *curve, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key"),
            *("-out", f"{ca}.pem", "-addext", "keyUsage=critical,keyCertSign"),
        )
    (directory / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(
            *("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key"),
            *("-out", f"{name}.csr"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.pem"),
        )
    return directory
