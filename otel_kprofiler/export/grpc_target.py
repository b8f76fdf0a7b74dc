"""Parses addresses of gRPC receivers (gRPC Name Resolution), and connects to them."""

import base64
import contextlib
import ipaddress
import re
import socket
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.connections import connect_to, explained, open_socket, show_host
from otel_kprofiler.export.http2 import send_all, set_deadline
from otel_kprofiler.export.name_lookup import NameLookups, Watch
from otel_kprofiler.redact import redact_address

_HTTPS_PORT: Final = 443
"""The port of a target without a port, as in gRPC."""
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(?!\d+$)", re.IGNORECASE)
_MAX_PROXY_BYTES: Final = 65536
_END: Final = b"\r\n\r\n"
_PROXY_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r\n]*")


class Target(NamedTuple):
    """A receiver's address.

    Attributes:
        authority: host and port as written, for requests and proxies.
        hosts: hosts (names, or IP addresses without brackets) and ports, in order of preference.
        path: path of a UNIX socket, starting with a null byte if abstract; empty for TCP.
    """

    authority: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""

    @property
    def server_name(self) -> str:
        """Returns the name that the receiver's certificate must have (RFC 6066, section 3)."""
        return self.hosts[0][0].rstrip(".") if self.hosts else self.authority


def parse_target(text: str) -> Target:
    """Parses ``host[:port]``, ``dns:``, ``ipv4:``, ``ipv6:``, ``unix:`` or ``unix-abstract:``.

    Raises:
        ExportError: the address is malformed, or its scheme is not supported.
    """
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else "dns"
    rest = text[match.end() :] if match else text
    if scheme == "unix":
        return Target("localhost", path=rest.removeprefix("//"))
    if scheme == "unix-abstract":
        return Target("localhost", path=f"\0{rest}")
    if scheme in {"dns", "passthrough"} and rest.startswith("//"):
        server, _, rest = rest[2:].partition("/")
        if server:
            raise _malformed(text, "name servers in addresses are not supported: remove the server")
    if scheme not in {"dns", "passthrough", "ipv4", "ipv6"}:
        raise _malformed(text, "use host:port, dns:, ipv4:, ipv6:, unix: or unix-abstract:")
    parts = rest.split(",") if scheme.startswith("ipv") else [rest]
    try:
        return Target(rest, tuple(map(_parse_host, parts)))
    except ValueError as error:
        raise _malformed(text, "write the address as host:port") from error


def _malformed(text: str, hint: str) -> ExportError:
    return ExportError(f"{redact_address(text)!r} is not a valid gRPC endpoint", hint=hint)


def _parse_host(text: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):  # an IPv6 address without brackets and port
        return str(ipaddress.IPv6Address(text)), _HTTPS_PORT
    url = urlsplit(f"//{text}")
    if not url.hostname or url.netloc != text:
        raise ValueError(text)
    return url.hostname, _HTTPS_PORT if url.port is None else url.port


def connect(
    target: Target, proxy_url: str, deadline: float, watch: Watch, names: NameLookups
) -> socket.socket:
    """Connects to a receiver, through the proxy unless the receiver is in ``NO_PROXY``.

    Args:
        deadline: a time of ``time.monotonic()``.
        names: resolves the name of the receiver or the proxy.

    Raises:
        ConnectError: the receiver or the proxy cannot be reached, or the proxy refuses.
        TimeoutError: the deadline has passed.
    """
    if target.path:
        shown = target.path.replace("\0", "@")
        return open_socket(socket.AF_UNIX, target.path, shown, deadline, watch)
    if proxy_url and not proxy_bypass(target.server_name):
        return _connect_through(proxy_url, show_host(*target.hosts[0]), deadline, watch, names)
    return connect_to(target.hosts, deadline, watch, names)


def _connect_through(
    proxy_url: str, authority: str, deadline: float, watch: Watch, names: NameLookups
) -> socket.socket:
    url = urlsplit(proxy_url)
    host, port = url.hostname or "", url.port or 80
    headers = [f"Host: {authority}"]
    if url.username is not None:
        credentials = f"{unquote(url.username)}:{unquote(url.password or '')}"
        encoded = base64.b64encode(credentials.encode()).decode()
        headers.append(f"Proxy-Authorization: Basic {encoded}")
    sock = connect_to(((host, port),), deadline, watch, names)
    try:
        with explained(f"the proxy {host}:{port}"):
            _open_tunnel(sock, authority, headers, deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def _open_tunnel(sock: socket.socket, authority: str, headers: list[str], deadline: float) -> None:
    """Asks a proxy for a tunnel (RFC 9110, 9.3.6). Raises ``OSError`` if the proxy refuses."""
    lines = [f"CONNECT {authority} HTTP/1.1", *headers, "", ""]
    send_all(sock, "\r\n".join(lines).encode(), deadline)
    status = _PROXY_STATUS.match(_read_head(sock, deadline))
    if status is None or not status[1].startswith(b"2"):
        reason = status[0].decode("latin-1") if status else "no HTTP response"
        raise OSError(f"no tunnel to {authority}: {reason}")


def _read_head(sock: socket.socket, deadline: float) -> bytes:
    """Reads a response's status and headers, but not the bytes after them."""
    head = b""
    while not head.endswith(_END) and len(head) < _MAX_PROXY_BYTES:
        set_deadline(sock, deadline)
        arrived = sock.recv(_MAX_PROXY_BYTES, socket.MSG_PEEK)
        if not arrived:
            break
        end = (head + arrived).find(_END)
        head += sock.recv(len(arrived) if end < 0 else end + len(_END) - len(head))
    return head
