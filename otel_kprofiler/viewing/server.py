"""Serves the ``view`` page over HTTP, and serves data only to that page.

Rejects requests for any host name or address other than this server's. The check prevents DNS
rebinding, in which the name of another site resolves to this server. Other origins cannot read
responses (CORS). Pages on other sites may link to this page but cannot request data
(``Sec-Fetch-Site``). On loopback, only users returned by :func:`find_trusted_users` receive
responses.
"""

import json
import os
import socket
import zlib
from collections.abc import Callable, Iterable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from otel_kprofiler.errors import HostError, KProfilerError, describe_error
from otel_kprofiler.serving import HttpHandler, HttpServer, is_address, is_loopback
from otel_kprofiler.viewing.peers import find_peer_user, find_trusted_users
from otel_kprofiler.viewing.source_files import SourceError, read_source

DATA: Final = "profile.json"
SOURCE: Final = "source.json"
"""Path from which the page fetches source files, with a ``file`` query parameter."""

_TIMEOUT_S: Final = 120.0
"""Time limit for a connection, in seconds. The limit suffices to transfer an hour of samples over a
slow SSH connection."""
_SILENCE_S: Final = 20.0
_MAX_QUERY: Final = 2000
_MAX_MS: Final = 1 << 50
_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31  # zlib's wbits for a gzip header
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class QueryError(KProfilerError):
    """Raised for a query that cannot be answered."""


class Query(NamedTuple):
    """The samples that a request selects.

    Attributes:
        start_ms: start of the range as Unix time in milliseconds; None for the first sample.
        end_ms: end of the range, exclusive, as Unix time in milliseconds; None to include the last
            sample.
        last_s: length of a range that ends now, in seconds; replaces ``start_ms`` and ``end_ms``.
        resource: resource id, as in the page's data; empty for all resources.
    """

    start_ms: float | None = None
    end_ms: float | None = None
    last_s: float | None = None
    resource: str = ""


Answer = Callable[[Query], Iterable[bytes]]
"""Function that returns the page's data for a query, in chunks; may raise :class:`QueryError`."""

NamesFile = Callable[[str], bool]
"""Function that returns whether any frame of the profile is from the given source file."""


def parse_query(text: str) -> Query:
    """Parses the query of a URL: ``from``, ``to``, ``last``, ``resource``.

    Raises :class:`QueryError` if a number is invalid or too large, or the query is too long.
    """
    if len(text) > _MAX_QUERY:
        raise QueryError("the query is too long")
    fields = parse_qs(text)
    first, end, last = (_number(fields, name) for name in ("from", "to", "last"))
    return Query(first, end, last, fields.get("resource", [""])[0])


def _number(fields: dict[str, list[str]], name: str) -> float | None:
    if name not in fields:
        return None
    text = fields[name][0]
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number <= _MAX_MS:
        raise QueryError(f"{name} is not a time: {text[:40]}")
    return number


class PageServer:
    """Serves the viewer's page until closed.

    Raises ``HostError`` if it cannot listen on the endpoint.

    Args:
        endpoint: ``host:port`` to listen on. Port 0 selects a free port.
        page: the page, which fetches :data:`DATA`.
        answer: returns the data for a query; called in server threads.
        names_file: returns whether a source file is served; called in server threads, and only when
            listening on a loopback address.
    """

    def __init__(
        self, endpoint: str, page: str, answer: Answer, names_file: NamesFile = lambda _: False
    ) -> None:
        try:
            self._server = _Server(endpoint, page.encode(), answer, names_file)
        except OSError as error:
            raise HostError(
                f"cannot serve the page on {endpoint}: {error.strerror}",
                hint="choose another address or port: --bind, --port",
            ) from error
        host = endpoint.rpartition(":")[0]
        if is_address(host.strip("[]")) and ip_address(host.strip("[]")).is_unspecified:
            host = socket.gethostname()
        self.address = f"http://{host}:{self._server.port}/"

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class _Server(HttpServer):
    def __init__(self, endpoint: str, page: bytes, answer: Answer, names_file: NamesFile) -> None:
        self.page = page
        self.answer = answer
        self.names_file = names_file
        self.users = find_trusted_users()
        super().__init__(endpoint, _Handler, name="view", timeout_s=_TIMEOUT_S)

    def names(self) -> list[str]:
        return [] if is_loopback(self.host) else [socket.gethostname().lower()]


class _Handler(HttpHandler):
    server: _Server
    timeout = _SILENCE_S
    _user: int | None = None

    def do_GET(self) -> None:  # noqa: N802 - name of http.server
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if not self.is_named(*self.server.names()):
            self.send_error(HTTPStatus.FORBIDDEN, "this server does not accept this host name")
        elif problem := self._find_user_problem():
            self.send_error(HTTPStatus.FORBIDDEN, problem)
        elif not self._is_of_us(url.path):
            self.send_error(HTTPStatus.FORBIDDEN, "other pages cannot read profiles")
        elif url.path == "/":
            self._send("text/html; charset=utf-8", [self.server.page])
        elif make := {f"/{DATA}": self._query, f"/{SOURCE}": self._read}.get(url.path):
            try:
                self._send("application/json", make(url.query))
            except (QueryError, SourceError) as error:
                self.send_error(HTTPStatus.BAD_REQUEST, error.message)
            except KProfilerError as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, error.with_fix())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _find_user_problem(self) -> str:
        """Returns why the client's user is not permitted to read the page; empty if permitted."""
        if not is_loopback(self.server.host):
            return ""
        try:
            user = find_peer_user(self.connection)
        except OSError as error:
            return f"request rejected: its user could not be determined ({describe_error(error)})"
        self._user = user
        return "" if user in self.server.users else "another user of this host serves this page"

    def _query(self, query: str) -> Iterable[bytes]:
        return self.server.answer(parse_query(query))

    def _read(self, query: str) -> Iterable[bytes]:
        if self._user is None:
            raise SourceError(
                "source files are shown only on a page that other hosts cannot read: omit --bind"
            )
        path = "" if len(query) > _MAX_QUERY else parse_qs(query).get("file", [""])[0]
        if not path or not self.server.names_file(path):
            raise SourceError("no frame in this profile refers to this source file")
        user = os.geteuid() if self._user == 0 else self._user
        source = read_source(path, user)._asdict()
        return [json.dumps({**source, "host": socket.gethostname()}).encode()]

    def _is_of_us(self, path: str) -> bool:
        if self.headers.get("Sec-Fetch-Site", "none") in {"none", "same-origin"}:
            return True
        kind = (self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest"))
        return path == "/" and kind == ("navigate", "document")

    def _send(self, media_type: str, pieces: Iterable[bytes], status: int = HTTPStatus.OK) -> None:
        headers = getattr(self, "headers", {})  # missing if the request could not be parsed
        is_packed = "gzip" in headers.get("Accept-Encoding", "")
        body = pack(pieces) if is_packed else b"".join(pieces)
        more = {"Content-Encoding": "gzip"} if is_packed else {}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            more["Allow"] = "GET"
        self.respond(status, media_type, body, _HEADERS | more)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, None
        text = message or HTTPStatus(code).phrase
        self.close_connection = True
        self._send("application/json", [json.dumps({"error": text}).encode()], code)


def pack(pieces: Iterable[bytes]) -> bytes:
    """Returns the data in ``pieces``, compressed with gzip."""
    packer = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW)
    body = bytearray()
    for piece in pieces:
        body += packer.compress(piece)
    return bytes(body + packer.flush())
