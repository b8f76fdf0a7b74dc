"""Looks up the names of the users who own processes."""

import re
import time
from typing import Final

from otel_kprofiler.host import HostFiles, is_in_cgroup_namespace, parse_cgroup
from otel_kprofiler.text import decode_name

_HOST: Final = "/proc/1/root/etc/passwd"
_OWN: Final = "/etc/passwd"
_MAX_BYTES: Final = 4 << 20
_KEPT_S: Final = 60.0
_MOST: Final = 4096


class Owners:
    """Finds user names by id in the host's ``/etc/passwd``; not thread-safe.

    In a container, ``/etc/passwd`` belongs to the image, so only process 1's file is used, which
    requires permission to trace process 1. Other sources of names, such as LDAP, may block and are
    not queried.
    """

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._names: dict[int, str] = {}
        self._forget_at = 0.0
        self._path: str | None = None

    def find(self, uid: int) -> str:
        """Returns a user's name; empty if it cannot be read. Names are cached for a minute."""
        now = time.monotonic()
        if now >= self._forget_at or len(self._names) >= _MOST:
            self._names.clear()
            self._forget_at = now + _KEPT_S
        name = self._names.get(uid)
        if name is None:
            name = self._names[uid] = parse_user_name(self._read(), uid)
        return name

    def _read(self) -> bytes:
        for path in (_HOST, _OWN) if self._path is None else (self._path,):
            if path == _OWN and _is_in_container(self._files):
                break
            try:
                text = self._files.read_bytes(path)
            except OSError:
                continue
            self._path = path
            return text[:_MAX_BYTES]
        return b""


def parse_user_name(passwd: bytes, uid: int) -> str:
    """Returns the first name with the given user id in a passwd(5) file; empty if there is none."""
    match = re.search(rb"^([^:\n#][^:\n]*):[^:\n]*:0*%d:" % uid, passwd, re.MULTILINE)
    return decode_name(match[1]) if match else ""


def _is_in_container(files: HostFiles) -> bool:
    if is_in_cgroup_namespace(files):
        return True
    try:
        return bool(parse_cgroup(files.read_bytes("/proc/self/cgroup")).container)
    except OSError:
        return True
