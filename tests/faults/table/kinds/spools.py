"""Spool segments that are corrupted between two runs."""

from __future__ import annotations

import os
import stat
import struct
import time
import zlib

from tests.faults.table.receivers import HttpReceiver
from tests.faults.table.scenario import Scenario
from tests.servers import free_port

KIND = "damage to a spool"


class AwayReceiver(HttpReceiver):
    """A receiver at whose configured address nothing listens."""

    def configure(self, address=None):
        return super().configure(("127.0.0.1", free_port()))


def damaged(damage, segments=1):
    """Returns a fault that stops the agent, corrupts its spool, and restarts it.

    If there are several ``segments``, each is written by a separate run of the agent.
    """

    def fault(run):
        receiver = run.config["exporters"][run.exporter]
        for number in range(segments):
            time.sleep(2)
            run.stop()
            if number + 1 < segments:
                run.restart()
        receiver.update(HttpReceiver.configure(run.receiver))
        damage(run, run.segments)
        run.restart()
        time.sleep(2)

    return fault


def patch(at, change, which=0):
    """Returns a function that changes a segment at an offset, or at a fraction of its length."""

    def damage(run, segments):
        segment = segments[which]
        data = bytearray(segment.read_bytes())
        start = int(at * len(data)) if isinstance(at, float) else at % len(data)
        segment.write_bytes(change(data, start))

    return damage


def flip(data, at):
    data[at] ^= 0xFF
    return data


def zero(data, at):
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    return data


def cut(data, at):
    return data[:at]


def with_segment(name, content):
    def damage(run, segments):
        segments[0].with_name(name).write_bytes(content(segments) if callable(content) else content)

    return damage


def huge_record(run, segments):
    with segments[0].open("ab") as file:
        file.write(struct.pack("<IIB", 0, 1 << 30, 1) + b"x")


def lying_record(run, segments):
    """Appends a record with a valid checksum but impossible counts in its JSON."""
    body = b'{"settled": 9007199254740993, "done": {"on_cpu": -5}, "appended": {"on_cpu": 1e400}}'
    checked = struct.pack("<IB", len(body), 2) + body
    with segments[-1].open("ab") as file:
        file.write(zlib.crc32(checked).to_bytes(4, "little") + checked)


def swap(run, segments):
    first, second = segments[0].read_bytes(), segments[1].read_bytes()
    segments[0].write_bytes(second)
    segments[1].write_bytes(first)


def link_away(run, segments):
    target = run.directory / "moved.spool"
    segments[0].rename(target)
    segments[0].symlink_to(target)


def replace(make):
    def damage(run, segments):
        segments[0].unlink()
        make(segments[0])

    return damage


def version(magic):
    return patch(0, lambda data, at: magic + data[8:])


def bring_back(run):
    """Checks that a segment with another format version is set aside, and can be restored later."""
    damaged(version(b"kpspool1"), 2)(run)
    run.stop()
    (aside,) = run.spool.glob("*/*.aside")
    place = run.directory / "restored" / aside.parent.name
    place.mkdir(parents=True, mode=0o700)
    aside.rename(place / aside.name.removesuffix(".aside"))
    version(b"kpspool2")(run, list(place.glob("*.spool")))
    queue = {"storage": str(place.parent)}
    run.has_moved_spool = True
    run.config["exporters"][run.exporter]["sending_queue"] = queue
    run.restart()
    time.sleep(2)


def every(size):
    def change(data, at):
        for at in range(20, len(data), size):  # noqa: PLR1704 - each of them
            data[at] ^= 0xFF
        return data

    return change


def one(name, damage, **more):
    return Scenario(
        KIND, name, damaged(damage, more.pop("segments", 2)), AwayReceiver, spool=True,
        others="the agent is restarted", **more,
    )  # fmt: skip


HUGE_NAMES = {
    "the number 2^64-1": f"{(1 << 64) - 1:020}.spool", "the number 2^62": f"{1 << 62:020}.spool",
    "a 200-digit number": "9" * 200 + ".spool", "a negative number": "-0000000000000000001.spool",
}  # fmt: skip

SCENARIOS = [
    one("nothing, as a control", lambda run, segments: None),
    one("a byte of the magic number", patch(0, flip)),
    Scenario(KIND, "magic number of another version, with a third run that delivers the segment",
             bring_back, AwayReceiver, spool=True, others="the agent is restarted"),
    one("a byte of a checksum", patch(8, flip)),
    one("a byte of a length field", patch(12, flip)),
    one("a byte of a record's type", patch(16, flip)),
    one("a byte in the middle of the oldest segment", patch(0.5, flip)),
    one("a byte three quarters into the newest segment", patch(0.75, flip, -1)),
    one("one byte in every 1,000", patch(0.5, every(1000))),
    one("one byte in every 20,000", patch(0.5, every(20_000))),
    one("4,096 zero bytes in the middle", patch(0.5, zero)),
    one("4,096 zero bytes at the start", patch(0, zero)),
    one("zeros only", patch(0, lambda data, at: bytes(len(data)))),
    one("1,000 random bytes inserted",
        patch(0.5, lambda data, at: data[:at] + os.urandom(1000) + data[at:])),
    one("the oldest segment truncated to half its size", patch(0.5, cut)),
    one("the oldest segment truncated in its magic number", patch(5, cut)),
    one("the oldest segment truncated by 3 bytes", patch(-3, cut)),
    one("halves of the oldest segment swapped",  # the magic number stays in place
        patch(0.5, lambda data, at: data[:8] + data[at:] + data[8:at])),
    one("records in the oldest segment repeated", patch(0.5, lambda data, at: data + data[8:at])),
    one("two segments exchanged", swap),
    one("the oldest segment removed", lambda run, segments: segments[0].unlink()),
    one("the middle segment removed", lambda run, segments: segments[1].unlink(), segments=3),
    one("the oldest segment empty", lambda run, segments: segments[0].write_bytes(b"")),
    one("8 GiB hole appended to the oldest segment",
        lambda run, segments: os.truncate(segments[0], 8 << 30)),
    one("a record with a length of 1 GiB", huge_record),
    one("a record with impossible counts", lying_record),
    *[one(f"a segment with {text}", with_segment(name, b"kpspool2"))
      for text, name in HUGE_NAMES.items()],
    one("a segment of random bytes", with_segment("00000000000000000000.spool",
                                                  lambda _: os.urandom(100_000))),
    one("the oldest segment is copied to a later segment number",
        with_segment("00000000000009999999.spool", lambda segments: segments[0].read_bytes())),
    one("the oldest segment is a symbolic link", link_away),
    one("the oldest segment has a second hard link",
        lambda run, segments: os.link(segments[0], segments[0].with_name(f"{0:020}.spool"))),
    one("the oldest segment is a directory", replace(lambda path: path.mkdir())),
    one("the oldest segment is a FIFO", replace(os.mkfifo)),
    one("the oldest segment is a device",
        replace(lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)))),
    one("the oldest segment belongs to another user",
        lambda run, segments: os.chown(segments[0], 65534, 65534)),
]  # fmt: skip
