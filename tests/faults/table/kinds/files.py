"""ELF files crafted to consume memory or time, and processes that run code from these files."""

from __future__ import annotations

import functools
import os
import struct
import time
from pathlib import Path

from tests.faults.table.programs import build
from tests.faults.table.scenario import Scenario, wait
from tests.unit.symbols.user.hostile_files import KINDS

MEMORY, BROKEN = "file that takes memory", "broken ELF file"
COPIES = 4


def running(make, copies=1, name="hostile"):
    """Runs code from distinct copies of a file, which differ only in their last bytes."""

    def fault(run):
        content = make()
        paths = []
        for number in range(copies):
            paths.append(run.public / f"{name}{number}")
            with paths[-1].open("wb") as file:
                file.write(content)
                file.write(struct.pack("<Q", number) if copies > 1 else b"")
            paths[-1].chmod(0o755)
        run.start("nice", build("runs_code.c"), *paths)
        time.sleep(2)
        wait(run)

    return fault


@functools.cache
def program() -> bytes:
    return build("control.c").read_bytes()


def changed(offset, form, value, find_headers):
    """Returns a function that builds a program with a changed field in some headers."""

    def make():
        data = bytearray(program())
        for at in find_headers(data):
            struct.pack_into("<" + form, data, at + offset, value)
        return bytes(data)

    return make


def field(*change):
    return changed(*change, lambda data: [0])


def sections(*change):
    def find_headers(data):
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        return range(start, start + size * count, size)

    return changed(*change, find_headers)


def segments(*change):
    def find_headers(data):
        (count,) = struct.unpack_from("<H", data, 56)
        return range(64, 64 + 56 * count, 56)

    return changed(*change, find_headers)


def cut_to(size):
    return lambda: program()[:size]


DAMAGES = {
    "truncated after its header": cut_to(64),
    "truncated in its header": cut_to(40),
    "truncated to half its size": lambda: program()[: len(program()) // 2],
    "zeros after its magic number": lambda: b"\x7fELF" + bytes(8192),
    "random bytes after the header": lambda: program()[:64] + os.urandom(200_000),
    "32-bit according to its class": field(4, "B", 1),
    "big-endian according to its header": field(5, "B", 2),
    "65,535 sections": field(60, "H", 65535),
    "section count stored in the first section header": field(60, "H", 0),
    "sections at 2^64-1": field(40, "Q", 2**64 - 1),
    "section headers of 0 bytes": field(58, "H", 0),
    "section names in a nonexistent section": field(62, "H", 65279),
    "65,535 segments": field(56, "H", 65535),
    "segments at 2^63": field(32, "Q", 1 << 63),
    "sections of 2^63 bytes": sections(32, "Q", 1 << 63),
    "all sections are symbol tables": sections(4, "I", 2),
    "all sections are compressed": sections(8, "Q", 0x800),
    "sections that link to themselves": sections(40, "I", 1),
    "entries of 0 bytes": sections(56, "Q", 0),
    "segments of 2^64-1 bytes": segments(32, "Q", 2**64 - 1),
    "segments at the same address": segments(16, "Q", 0),
    "all segments have type PT_GNU_EH_FRAME": segments(0, "I", 0x6474E550),
    "all segments are notes": segments(0, "I", 4),
    "machine of another architecture": field(18, "H", 243),
}


def sparse(run):
    path = run.public / "sparse"
    path.write_bytes(program())
    os.truncate(path, 8 << 30)
    run.start("nice", build("runs_code.c"), path)
    wait(run)


def changing(run):
    """Runs a file whose content changes 100 times a second while it is read."""
    path, other = run.public / "changing", program()
    path.write_bytes(other)
    run.start("nice", build("runs_code.c"), path)
    end, size = time.monotonic() + run.seconds, len(other)
    with path.open("r+b") as file:
        while time.monotonic() < end:
            os.pwrite(file.fileno(), os.urandom(3000), 64 + time.monotonic_ns() % (size - 3064))
            time.sleep(0.01)


def truncated(run):
    """Truncates a mapped file and extends it again, 20 times."""
    path = run.public / "truncated"
    path.write_bytes(program() * 2)
    run.start("nice", build("runs_code.c"), path)
    time.sleep(0.3)
    for _ in range(20):
        os.truncate(path, 4200)
        time.sleep(0.05)
        os.truncate(path, len(program()) * 2)
        time.sleep(0.05)
    wait(run)


def many(run):
    paths = []
    for number in range(300):
        paths.append(run.public / f"file{number}")
        paths[-1].write_bytes(program() + struct.pack("<Q", number))
    run.start("nice", build("runs_code.c"), *paths)
    wait(run)


def unlinked(run):
    path = Path(run.public / "unlinked")
    path.write_bytes(program())
    run.start("nice", build("runs_code.c"), path)
    time.sleep(0.3)
    path.unlink()
    wait(run)


SCENARIOS = [
    *[Scenario(MEMORY, f"{COPIES} hostile files: {name.replace('-', ' ')}", running(make, COPIES),
               alone=True) for name, make in KINDS.items()],
    *[Scenario(BROKEN, name, running(make)) for name, make in DAMAGES.items()],
    Scenario(BROKEN, "8 GiB of holes", sparse),
    Scenario(BROKEN, "file changes while it is being read", changing),
    Scenario(BROKEN, "mapped file is truncated to one page, 20 times", truncated),
    Scenario(BROKEN, "file is removed while mapped", unlinked),
    Scenario(MEMORY, "300 small files", many, alone=True),
    *[Scenario(BROKEN, f"name {text}", running(program, name=name))
      for text, name in {
          "with a line feed and a tab": "a\nb\tc", "with terminal escape sequences": "\x1b[2J",
          "that is not UTF-8": b"\xff\xfe".decode("utf-8", "surrogateescape"),
          "that ends in (deleted)": "x (deleted)", "of 240 bytes": "x" * 240,
          "with right-to-left text": "\u202egpj.exe",
      }.items()],
]  # fmt: skip
