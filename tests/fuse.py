"""A FUSE file system that holds regular files and, on demand, freezes or responds late.

A separate process serves the file system, using only ``/dev/fuse`` and mount(2). When this process
exits, the kernel aborts pending requests, so that no test leaves an unkillable process. The
structures and numbers are defined in ``include/uapi/linux/fuse.h``, protocol 7.31.
"""

import argparse
import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

_DEVICE = "/dev/fuse"
_IN, _OUT = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
_READ_IN = struct.Struct("=QQI")
_ATTR = struct.Struct("=6Q10I")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ = 1, 2, 3, 14, 15
_RELEASE, _FLUSH, _INIT = 18, 25, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_UNANSWERED = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_OPCODES = {"lookup": _LOOKUP, "getattr": _GETATTR, "open": _OPEN, "read": _READ}
_ASYNC_READ, _DIRECT_IO, _KEEP_CACHE = 1, 1, 2
_MAX_READ = 128 << 10
_ROOT = 1
_CACHED_S = 3600
_MNT_DETACH = 2


def require_fuse():
    if not os.path.exists(_DEVICE):
        pytest.skip(f"{_DEVICE} is missing: the kernel lacks FUSE, or the container the device")
    if os.geteuid():
        pytest.skip("mount(2) needs CAP_SYS_ADMIN: run the tests as root")
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        pytest.skip(f"{_DEVICE} cannot be opened: {error.strerror}")


class Fuse:
    """A mounted file system with the given files, a mapping of names to content.

    Unless ``cached`` is set, the kernel requests names, attributes and content on each access.
    """

    def __init__(self, point, files, *, cached=True):
        require_fuse()
        self.point = point
        source = point.parent / f"{point.name}.files"
        source.mkdir()
        for name, content in files.items():
            (source / name).write_bytes(content)
        point.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.fuse", str(point), str(source)]
        self._server = subprocess.Popen(
            [*command, *(["--cached"] if cached else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            text=True,
        )
        assert self._server.stdout.readline() == "mounted\n"

    def freeze(self, *opcodes, delay_s=None, beyond=0):
        """Delays or withholds responses to the given types of requests.

        Args:
            opcodes: the types of requests, as keys of ``_OPCODES``; empty for all types.
            delay_s: the delay of the responses in seconds, or None to send no response.
            beyond: the offset below which reads are not delayed.
        """
        delay = "inf" if delay_s is None else delay_s
        self._ask(f"hold {delay} {beyond} {' '.join(opcodes or _OPCODES)}")

    def thaw(self):
        self._ask("thaw")

    def count_held(self):
        return int(self._ask("count"))

    def close(self):
        """Stops the server and unmounts the files, so that pending requests fail. Idempotent."""
        if self._server.poll() is not None:
            return
        self._server.kill()
        self._server.communicate()
        _call("umount2", os.fsencode(self.point), _MNT_DETACH)

    def _ask(self, command):
        self._server.stdin.write(command + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


@contextlib.contextmanager
def mounted(point, files, **options):
    fuse = Fuse(point, files, **options)
    try:
        yield fuse
    finally:
        fuse.close()


class _Server:
    def __init__(self, fd, directory, cached_s):
        self._fd, self._cached_s = fd, cached_s
        self._names = dict(enumerate(sorted(os.listdir(directory)), _ROOT + 1))
        self._content = {
            inode: Path(directory, name).read_bytes() for inode, name in self._names.items()
        }
        self._held, self._opcodes, self._delay_s, self._beyond = [], (), 0.0, 0
        self._commands = b""

    def serve(self):
        while True:
            due = min((when for when, _ in self._held), default=float("inf"))
            timeout = None if due == float("inf") else max(0.0, due - time.monotonic())
            ready, _, _ = select.select([self._fd, 0], [], [], timeout)
            self._answer_due(time.monotonic())
            if 0 in ready and not self._read_commands():
                return
            if self._fd in ready:
                self._take()

    def _take(self):
        try:
            request = os.read(self._fd, _MAX_READ + 4096)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                return  # the kernel has withdrawn the request
            raise
        if self._is_frozen(request):
            self._held.append((time.monotonic() + self._delay_s, request))
        else:
            self._answer(request)

    def _is_frozen(self, request):
        opcode = _IN.unpack_from(request)[1]
        if opcode == _READ and _READ_IN.unpack_from(request, _IN.size)[1] < self._beyond:
            return False
        return opcode in self._opcodes

    def _read_commands(self):
        data = os.read(0, 4096)
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            command, *words = line.decode().split()
            if command == "hold":
                self._delay_s = float(words[0])
                self._beyond = int(words[1])
                self._opcodes = [_OPCODES[word] for word in words[2:]]
            elif command == "thaw":
                self._opcodes = ()
                self._answer_due(float("inf"))
            _say(len(self._held))
        return bool(data)

    def _answer_due(self, now):
        due = [request for when, request in self._held if when <= now]
        self._held = [(when, request) for when, request in self._held if when > now]
        for request in due:
            self._answer(request)

    def _answer(self, request):
        _, opcode, unique, inode, *_ = _IN.unpack_from(request)
        if opcode in _UNANSWERED:
            return
        answer = self._make_answer(opcode, inode, request[_IN.size :])
        error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
        with contextlib.suppress(FileNotFoundError):  # the process has exited
            os.write(self._fd, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    def _make_answer(self, opcode, inode, body):
        """Returns the body of a response, or an errno."""
        answers = {
            _INIT: self._answer_init,
            _LOOKUP: self._answer_lookup,
            _GETATTR: self._answer_getattr,
            _OPEN: self._answer_open,
            _READ: self._answer_read,
            _RELEASE: lambda *_: b"",
            _FLUSH: lambda *_: b"",
        }
        return answers[opcode](inode, body) if opcode in answers else errno.ENOSYS

    def _answer_init(self, *_):
        return _INIT_OUT.pack(7, 31, _MAX_READ, _ASYNC_READ, 64, 48, _MAX_READ, 1, 0, 0, 0)

    def _answer_lookup(self, _, body):
        name = os.fsdecode(body.rstrip(b"\0"))
        results = [inode for inode, known in self._names.items() if known == name]
        if not results:
            return errno.ENOENT
        times = struct.pack("=4Q2I", results[0], 0, self._cached_s, self._cached_s, 0, 0)
        return times + self._attributes(results[0])

    def _answer_getattr(self, inode, _):
        return struct.pack("=QII", self._cached_s, 0, 0) + self._attributes(inode)

    def _answer_open(self, inode, body):
        flags = _KEEP_CACHE if self._cached_s else 0
        if struct.unpack_from("=I", body)[0] & os.O_SYNC == os.O_SYNC:
            flags |= _DIRECT_IO  # so that mmap(2) waits for pages being read
        return struct.pack("=QII", inode, flags, 0)

    def _answer_read(self, inode, body):
        _, offset, size = _READ_IN.unpack_from(body)
        return self._content[inode][offset : offset + size]

    def _attributes(self, inode):
        is_root = inode == _ROOT
        size = 0 if is_root else len(self._content[inode])
        mode = 0o755 | (stat.S_IFDIR if is_root else stat.S_IFREG)
        return _ATTR.pack(
            inode, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )  # fmt: skip


def _say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main():
    """Mounts the file system and serves it until standard input is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("point")
    parser.add_argument("directory")
    parser.add_argument("--cached", action="store_true")
    arguments = parser.parse_args()
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    _call("mount", b"test", os.fsencode(arguments.point), b"fuse", 6, options)  # nosuid, nodev
    _say("mounted")
    try:
        _Server(fd, arguments.directory, _CACHED_S if arguments.cached else 0).serve()
    finally:  # even if the test was killed
        _call("umount2", os.fsencode(arguments.point), _MNT_DETACH)


if __name__ == "__main__":
    main()
