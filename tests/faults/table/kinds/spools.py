"""Segments of a spool that are damaged between two runs."""

from __future__ import annotations

import os
import time

from tests.faults.table.programs import free_port
from tests.faults.table.receivers import HttpReceiver
from tests.faults.table.scenario import Scenario

KIND = "damage to a spool"


class AwayReceiver(HttpReceiver):
    """A receiver that nobody listens for until it is healed."""

    def configure(self, address=None):
        return super().configure(("127.0.0.1", free_port()))


def damaged(damage, segments=1):
    """A fault that stops the agent, damages the spool that it leaves, and starts it again.

    With ``segments`` above 1 the first is closed by another run.
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
    """Change bytes of a segment; ``at`` is a share of its length, or an offset."""

    def damage(run, segments):
        segment = segments[which]
        data = bytearray(segment.read_bytes())
        start = int(at * len(data)) if isinstance(at, float) else at
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


def insert(data, at):
    return data[:at] + os.urandom(1000) + data[at:]


def one(name, damage, **more):
    return Scenario(
        KIND, name, damaged(damage, more.pop("segments", 2)), AwayReceiver, spool=True,
        others="the agent is restarted", **more,
    )  # fmt: skip


SCENARIOS = [
    one("nothing, as a control", lambda run, segments: None),
    one("a byte of the magic number", patch(0, flip)),
    one("a byte of a checksum", patch(8, flip)),
    one("a byte of a length", patch(12, flip)),
    one("a byte in the middle", patch(0.5, flip)),
    one("4,096 zeros in the middle", patch(0.5, zero)),
    one("1,000 random bytes inserted", patch(0.5, insert)),
    one("the oldest segment cut in half", patch(0.5, cut)),
    one("the oldest segment removed", lambda run, segments: segments[0].unlink()),
    one("the oldest segment empty", lambda run, segments: segments[0].write_bytes(b"")),
]
