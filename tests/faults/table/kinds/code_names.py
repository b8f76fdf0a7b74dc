"""Names for generated code, written by the programs themselves: perf maps and jitdumps."""

from __future__ import annotations

import os
import struct
import time

from tests.faults.table.scenario import Scenario, wait

MAP, DUMP = "perf map", "jitdump"

JIT = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
/* Runs code at 0x7e0000000000 once the file named by the argument is there, and maps it. */
int main(int argc, char **argv)
{
    unsigned char *code = mmap((void *)0x7e0000000000, 1 << 20, 7,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(code, 0x90, 1 << 20);
    code[(1 << 20) - 1] = 0xc3;
    while (access(argv[1], F_OK))
        usleep(10000);
    if (argc > 2)
        mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, open(argv[1], O_RDONLY), 0);
    for (;;)
        ((void (*)(void))code)();
}
"""
START = 0x7E0000000000


def line(number, name=b"function", size=16):
    return b"%x %x %s_%d\n" % (START + 16 * number, size, name, number)


def lines(count, **how):
    return b"".join(line(number, **how) for number in range(count))


def perf_map(write, *, after=None):
    """Writes a process's perf map, then appends to it or modifies it 20 times a second."""

    def fault(run):
        process = run.c(JIT, f"/tmp/kprofiler-go-{run.health}")
        path = f"/tmp/perf-{process.pid}.map"
        run.on_close(lambda: remove(path))
        run.on_close(lambda: remove(f"/tmp/kprofiler-go-{run.health}"))
        write(path)
        if not os.path.islink(path):
            os.chown(path, 65534, 65534)
        with open(f"/tmp/kprofiler-go-{run.health}", "wb"):
            pass
        end = time.monotonic() + run.seconds
        while after and time.monotonic() < end:
            after(path)
            time.sleep(0.05)
        wait(run)

    return fault


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    elif os.path.lexists(path):
        os.remove(path)


def text(data):
    def write(path):
        with open(path, "wb") as file:
            file.write(data() if callable(data) else data)

    return write


def sparse(path):
    text(line(1))(path)
    os.truncate(path, 8 << 30)


def grow(path):
    with open(path, "ab") as file:
        file.write(lines(20_000))


def rename(path):
    text(lines(100))(path + ".new")
    os.replace(path + ".new", path)


MAPS = {
    "2 million functions": text(lambda: lines(2_000_000)),
    "names of 60,000 bytes": text(lambda: lines(500, name=b"n" * 60_000)),
    "a line of 100 MB": text(lambda: b"x" * 100_000_000),
    "no line feed": text(lambda: line(1).strip()),
    "random bytes": text(lambda: os.urandom(5_000_000)),
    "100,000 functions at the same addresses": text(
        lambda: b"".join(b"%x %x f_%d\n" % (START, 1 << 20, n) for n in range(100_000))),
    "functions of 2^64-1 bytes": text(lambda: b"%x ffffffffffffffff all\n" % START * 1000),
    "names with control characters": text(lambda: lines(5000, name=b"\x1b[2J\r\x00\xff")),
    "8 GiB of holes": sparse,
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "link to /etc/shadow": lambda path: os.symlink("/etc/shadow", path),
    "device with endless output": lambda path: os.symlink("/dev/zero", path),
}  # fmt: skip
CHANGES = {"file grows by 20,000 lines 20 times a second": grow,
           "file is repeatedly truncated to half its size":
               lambda path: os.truncate(path, os.stat(path).st_size // 2),
           "file is constantly rewritten": text(lines(2000, name=b"other")),
           "file is constantly replaced": rename}  # fmt: skip


def header(pid, size=40, magic=0x4A695444, version=1):
    return struct.pack("=IIIIIIQQ", magic, version, size, 62, 0, pid, 0, 0)


def load(number, name=b"f", size=16, total=None):
    body = struct.pack("=IIQQQQ", 1, 1, START + 16 * number, START + 16 * number, size, number)
    body += name + b"\0" + bytes(min(size, 64))
    return struct.pack("=IIQ", 0, total or 16 + len(body), time.monotonic_ns()) + body


def jitdump(make):
    """Runs a process that maps a jitdump, as perf inject requires."""

    def fault(run):
        name = run.public / "dump"
        process = run.c(JIT, name, "mapped")
        path = run.public / f"jit-{process.pid}.dump"
        path.write_bytes(make(process.pid))
        os.chown(path, 65534, 65534)
        name.symlink_to(path)
        time.sleep(1)
        wait(run)

    return fault


DUMPS = {
    "500,000 functions": lambda pid: header(pid) + b"".join(map(load, range(500_000))),
    "random bytes after the header": lambda pid: header(pid) + os.urandom(1_000_000),
    "record of 0 bytes": lambda pid: header(pid) + struct.pack("=IIQ", 0, 0, 1) * 1000,
    "record of 2^32-1 bytes": lambda pid: header(pid) + load(1, total=2**32 - 1),
    "code of 2^63 bytes": lambda pid: header(pid) + load(1, size=1 << 63),
    "unterminated name": lambda pid: header(pid) + load(1, name=b"x" * 5_000_000)[:-70],
    "header of 2^32-1 bytes": lambda pid: header(pid, size=2**32 - 1) + load(1),
    "another process's id": lambda pid: header(1) + load(1),
    "other byte order": lambda pid: header(pid, magic=0x4454694A) + load(1),
    "unknown record types":
        lambda pid: header(pid) + struct.pack("=IIQ", 99, 16, 1) * 100_000,
    "line tables with 2^64-1 entries":
        lambda pid: header(pid) + struct.pack("=IIQQQ", 2, 32, 1, START, 2**64 - 1) + load(0),
}  # fmt: skip

SCENARIOS = [
    *[Scenario(MAP, name, perf_map(write), alone=True) for name, write in MAPS.items()],
    *[Scenario(MAP, name, perf_map(text(lambda: lines(1000)), after=after), alone=True)
      for name, after in CHANGES.items()],
    *[Scenario(DUMP, name, jitdump(make), alone=True) for name, make in DUMPS.items()],
]  # fmt: skip
