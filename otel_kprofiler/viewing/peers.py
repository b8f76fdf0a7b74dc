"""Finds the user at the other end of a loopback connection."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

_TABLES: Final = {4: "/proc/net/tcp", 6: "/proc/net/tcp6"}
_UNSET: Final = 0xFFFFFFFF
"""``AUDIT_UID_UNSET``, include/uapi/linux/audit.h."""


def find_trusted_users() -> frozenset[int]:
    """Returns the users who may read from this server: its own, root, and the user behind it.

    The user behind it is the caller of sudo(8), or the login user before su(1).
    """
    users = {0, os.getuid()}
    if os.getuid() == 0:
        with suppress(KeyError, ValueError):
            users.add(int(os.environ["SUDO_UID"]))
        with suppress(OSError, ValueError), open("/proc/self/loginuid", encoding="ascii") as file:
            users.add(int(file.read()))
    return frozenset(users - {_UNSET})


def find_peer_user(connection: socket.socket) -> int | None:
    """Returns the user of the process at the other end; None if it is not on this host.

    Raises:
        OSError: the kernel's table of connections cannot be read.
    """
    here, peer = connection.getsockname(), connection.getpeername()
    wanted = [_format(peer), _format(here)]
    with open(_TABLES[ip_address(peer[0]).version], encoding="ascii") as table:
        for row in table:
            fields = row.split()
            # A closed socket has no inode, and its user is not shown.
            if fields[1:3] == wanted and fields[9] != "0":
                return int(fields[7])
    return None


def _format(address: tuple[str, int]) -> str:
    """An address and port as tables in /proc/net have them: words in the order of this machine."""
    packed = ip_address(address[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
