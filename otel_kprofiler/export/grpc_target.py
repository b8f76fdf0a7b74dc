"""Addresses of gRPC receivers (gRPC Name Resolution), and sockets connected to them."""

import base64
import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.http2 import send_all, set_deadline
from otel_kprofiler.export.name_lookup import ConnectError, NameLookups, Watch
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
        return _open(socket.AF_UNIX, target.path, shown, deadline, watch)
    if proxy_url and not proxy_bypass(target.server_name):
        return _connect_through(proxy_url, _show(*target.hosts[0]), deadline, watch, names)
    return _connect_to(target.hosts, deadline, watch, names)


def _connect_to(
    hosts: tuple[tuple[str, int], ...], deadline: float, watch: Watch, names: NameLookups
) -> socket.socket:
    """Tries all addresses in turn; each may take an equal part of the time that is left."""
    addresses = [
        (family, address, _show(host, port))
        for host, port in hosts
        for family, address in names.resolve(host, port, deadline, watch)
    ]
    failure: Exception = ConnectError("the receiver's name has no address")
    for number, (family, address, shown) in enumerate(addresses):
        now = time.monotonic()
        try:
            part = (deadline - now) / (len(addresses) - number)
            return _open(family, address, shown, now + part, watch)
        except (ConnectError, TimeoutError) as error:
            failure = error
    raise failure


def _show(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open(
    family: socket.AddressFamily, address: Any, shown: str, deadline: float, watch: Watch
) -> socket.socket:
    with _explained(f"cannot connect to {shown}"):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _attempt(sock, address, deadline, watch)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
    return sock


def _attempt(sock: socket.socket, address: Any, deadline: float, watch: Watch) -> None:
    sock.setblocking(False)
    error = sock.connect_ex(address)
    watch(lambda: shut_down(sock))  # has no effect before the attempt begins
    if error == errno.EINPROGRESS:
        error = _wait_until_connected(sock, deadline)
    if error:
        raise OSError(error, os.strerror(error))


def _wait_until_connected(sock: socket.socket, deadline: float) -> int:
    """Returns the attempt's ``errno``; 0 if it succeeded. Raises ``TimeoutError``."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{text}: no response") from error
    except OSError as error:
        raise ConnectError(f"{text}: {error.strerror or error}") from error


def shut_down(sock: socket.socket) -> None:
    """Aborts the socket's operations in all threads."""
    with contextlib.suppress(OSError):  # not connected, or already closed
        # SSLSocket.shutdown() is unsafe while another thread reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


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
    sock = _connect_to(((host, port),), deadline, watch, names)
    try:
        with _explained(f"the proxy {host}:{port}"):
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
