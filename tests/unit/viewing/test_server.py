"""The viewer's HTTP server responds only to permitted clients, with safe headers."""

import contextlib
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys

import pytest

from otel_kprofiler.errors import HostError, KProfilerError
from otel_kprofiler.viewing import PageServer, Query, QueryError

pytestmark = pytest.mark.system

NOBODY = 65534
SAME = {"Sec-Fetch-Site": "same-origin"}


ASKED = []


def answer(query):
    ASKED.append(query)
    if query.resource == "unknown":
        raise QueryError("there is no resource unknown")
    if query.resource == "broken":
        raise KProfilerError("the disk is broken", hint="buy another")
    return [b'{"strings":', b"[]}"]


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(PageServer("127.0.0.1:0", "<p>é", answer)) as server:
        yield server


@pytest.fixture
def asked():
    ASKED.clear()
    return ASKED


def port(server):
    return int(server.address.rstrip("/").rpartition(":")[2])


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port(server), timeout=20)
    with contextlib.closing(connection):
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_the_page_and_its_data_are_served(server, asked):
    status, headers, body = ask(server)
    assert (status, body) == (200, "<p>é".encode())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    status, headers, body = ask(server, "/profile.json?from=1000&to=2000.5&resource=host.name%3Da")
    assert (status, json.loads(body)) == (200, {"strings": []})
    assert headers["Content-Type"] == "application/json"
    assert asked == [Query(1000, 2000.5, None, "host.name=a")]


def test_responses_are_compressed_if_the_client_accepts_gzip(server):
    _, headers, body = ask(server, "/profile.json", Accept_Encoding="br, gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body)) == {"strings": []}


@pytest.mark.parametrize("path", ["/", "/profile.json", "/other", "/profile.json?from=x"])
def test_every_response_forbids_foreign_scripts_and_mime_sniffing(server, path):
    _, headers, _ = ask(server, path)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LOCALHOST", "127.0.0.1:8080", "[::1]:9", "192.0.2.7"]
)
def test_requests_for_local_names_and_addresses_are_accepted(server, host):
    assert ask(server, "/profile.json", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[", "a@b"]
)
def test_requests_with_a_foreign_host_header_are_rejected(server, asked, host):
    for path in ("/", "/profile.json"):
        assert ask(server, path, Host=host)[0] == 403
    assert asked == []


def test_this_hosts_name_is_accepted_only_when_listening_on_all_addresses():
    name = socket.gethostname()
    for host, status in (("127.0.0.1", 403), ("0.0.0.0", 200)):
        with contextlib.closing(PageServer(f"{host}:0", "", answer)) as server:
            assert ask(server, Host=f"{name}:80")[0] == status
    assert server.address.startswith(f"http://{name}:")


def test_a_request_without_a_host_header_is_rejected(server, asked):
    with socket.create_connection(("127.0.0.1", port(server)), timeout=20) as client:
        client.sendall(b"GET /profile.json HTTP/1.0\r\n\r\n")
        assert client.makefile("rb").readline().split()[1] == b"403"
    assert asked == []


@pytest.mark.parametrize("site", ["cross-site", "same-site", "new-word"])
def test_pages_from_other_sites_cannot_request_data(server, asked, site):
    for path, mode, kind in (
        ("/profile.json", "cors", "empty"),
        ("/profile.json", "no-cors", "script"),
        ("/profile.json", "navigate", "document"),
        ("/", "navigate", "iframe"),
        ("/", "cors", "empty"),
    ):
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": kind}
        assert ask(server, path, **headers)[0] == 403
    assert asked == []
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert ask(server, "/", **link)[0] == 200
    assert ask(server, "/profile.json", **SAME)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT", "X<y>"])
def test_methods_other_than_get_are_rejected(server, asked, method):
    status, headers, body = ask(server, "/profile.json", method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert b"<" not in body
    assert asked == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("from=x", "from is not a time: x"),
        ("to=-1", "to is not a time: -1"),
        ("last=nan", "last is not a time: nan"),
        ("last=inf", "last is not a time: inf"),
        ("from=1e99", "from is not a time: 1e99"),
        ("resource=unknown", "there is no resource unknown"),
    ],
)
def test_an_invalid_query_is_rejected_with_the_reason(server, query, problem):
    status, _, body = ask(server, f"/profile.json?{query}")
    assert (status, json.loads(body)) == (400, {"error": problem})


def test_a_server_error_response_contains_the_error_and_its_fix(server):
    status, _, body = ask(server, "/profile.json?resource=broken")
    assert status == 500
    assert json.loads(body) == {"error": "the disk is broken (fix: buy another)"}


@pytest.mark.parametrize(
    "request_",
    [
        b"\0\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET /profile.json?" + b"a=b&" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n",
    ],
)
def test_hostile_requests_are_rejected_without_a_traceback(server, capfd, caplog, request_):
    with (
        socket.create_connection(("127.0.0.1", port(server)), timeout=20) as client,
        contextlib.suppress(OSError),
    ):
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        said = client.makefile("rb").read()
        assert b" 4" in said[:20] or said.startswith(b'{"error": "Bad request')
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.exc_info]


def test_an_address_that_is_already_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostError, match="cannot serve the page on") as raised:
            PageServer(endpoint, "", lambda _: [])
    assert "--port" in raised.value.hint


ASKS = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=20)
connection.request("GET", sys.argv[3])
print(connection.getresponse().status)
"""


def ask_as(user, server, host, path):
    command = [sys.executable, "-ISc", ASKS, host, str(port(server)), path]
    return int(subprocess.run(command, user=user, capture_output=True, check=True).stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_other_users_on_this_host_cannot_read_the_page(host):
    endpoint = f"[{host}]:0" if ":" in host else f"{host}:0"
    with contextlib.closing(PageServer(endpoint, "<p>", answer)) as server:
        for path in ("/", "/profile.json"):
            assert ask_as(NOBODY, server, host, path) == 403
            assert ask_as(0, server, host, path) == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_the_user_who_ran_sudo_can_read_the_page(monkeypatch):
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    with contextlib.closing(PageServer("127.0.0.1:0", "<p>", answer)) as server:
        assert ask_as(NOBODY, server, "127.0.0.1", "/") == 200
