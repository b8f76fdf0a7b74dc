"""Finds the user at the other end of a loopback connection."""

import os
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple

_TABLES: Final = {4: "/proc/net/tcp", 6: "/proc/net/tcp6"}
_NETLINK_SOCK_DIAG: Final = 4  # include/uapi/linux/netlink.h
_SOCK_DIAG_BY_FAMILY: Final = 20  # include/uapi/linux/sock_diag.h
_NLM_F_REQUEST: Final = 1
_NO_COOKIE: Final = b"\xff" * 8  # INET_DIAG_NOCOOKIE
_LOOPBACK_INDEX: Final = 1  # LOOPBACK_IFINDEX; sockets need not be bound to the device
_HEADER: Final = struct.Struct("=IHHII")
_OPTIONS: Final = struct.Struct("=BBBxI")
"""The first fields of inet_diag_req_v2: family, protocol, extensions, states."""
_SOCKET_ID: Final = struct.Struct("!HH16s16s")
"""The first fields of inet_diag_sockid: ports, then local and remote addresses."""
_INTERFACE: Final = struct.Struct("=I8s")
_MESSAGE: Final = struct.Struct("=B3x36s24xII")
"""The fields read from inet_diag_msg: family, socket id, user, inode."""
_MAX_ANSWER_BYTES: Final = 4096
_TIMEOUT_S: Final = 5

_UNSET: Final = 0xFFFFFFFF
"""``AUDIT_UID_UNSET`` in include/uapi/linux/audit.h."""


def find_trusted_users() -> frozenset[int]:
    """Returns the users who may read from this server.

    Trusted users are root, the server's user, and the user who ran sudo(8) or logged in before
    su(1).
    """
    users = {0, os.getuid()}
    if os.getuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
        with suppress(OSError, ValueError), open("/proc/self/loginuid", encoding="ascii") as file:
            users.add(int(file.read()))
    return frozenset(users - {_UNSET})


class _End(NamedTuple):
    """One end of a connection. IPv4-mapped IPv6 addresses are stored as IPv4."""

    address: IPv4Address | IPv6Address
    port: int


class _Socket(NamedTuple):
    user: int
    inode: int  # 0 if the process has closed the socket; the user is then unknown


def find_peer_user(connection: socket.socket) -> int | None:
    """Returns the user id of a connection's peer process; None if the peer is on another host.

    The connection must be a TCP connection between loopback addresses. Raises ``OSError`` if the
    kernel's connection table cannot be read.
    """
    here, peer = _parse(connection.getsockname()), _parse(connection.getpeername())
    try:
        holder = _ask_kernel(peer, here)
        # A kernel without tcp_diag finds neither end of the connection.
        has_answered = holder or _ask_kernel(here, peer)
    except OSError:
        has_answered = None
    if not has_answered:
        holder = _search_table(peer, here)
    return holder.user if holder and holder.inode else None


def _parse(name: tuple[str, int]) -> _End:
    address = ip_address(name[0])
    return _End(getattr(address, "ipv4_mapped", None) or address, name[1])


def _ask_kernel(local: _End, remote: _End) -> _Socket | None:
    """Look up a socket by its addresses and ports (sock_diag(7)); None if no socket matches.

    Raises ``OSError`` if the kernel does not support or permit the lookup. pyroute2's
    ``DiagSocket`` can only list all sockets.
    """
    family = socket.AF_INET if local.address.version == 4 else socket.AF_INET6
    addresses = local.address.packed, remote.address.packed
    body = (
        _OPTIONS.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        + _SOCKET_ID.pack(local.port, remote.port, *addresses)
        + _INTERFACE.pack(_LOOPBACK_INDEX, _NO_COOKIE)
    )
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(_TIMEOUT_S)
        diag.sendto(header + body, (0, 0))
        answer = diag.recv(_MAX_ANSWER_BYTES)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # NLMSG_ERROR, such as ENOENT
    family, identity, user, inode = _MESSAGE.unpack_from(answer, _HEADER.size)
    size = 4 if family == socket.AF_INET else 16
    local_port, remote_port, *packed = _SOCKET_ID.unpack(identity)
    ends = [
        _parse((str(ip_address(address[:size])), port))
        for address, port in zip(packed, (local_port, remote_port), strict=True)
    ]
    # If no connection matches, the kernel returns a listening socket.
    return _Socket(user, inode) if ends == [local, remote] else None


def _search_table(local: _End, remote: _End) -> _Socket | None:
    ends = local, remote
    if local.address.version == 4:
        mapped = [_End(ip_address(f"::ffff:{end.address}"), end.port) for end in ends]
        return _search(_TABLES[4], *ends) or _search(_TABLES[6], *mapped)
    return _search(_TABLES[6], *ends)


def _search(path: str, local: _End, remote: _End) -> _Socket | None:
    wanted = [_format(local), _format(remote)]
    with open(path, encoding="ascii") as table:
        for row in table:
            fields = row.split()
            if fields[1:3] == wanted:
                return _Socket(int(fields[7]), int(fields[9]))
    return None


def _format(end: _End) -> str:
    packed = end.address.packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{end.port:04X}"
