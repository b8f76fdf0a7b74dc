"""Agents that are killed, and the runs that follow."""

from __future__ import annotations

import signal
import time

from tests.faults.table.kinds.spools import AwayReceiver, flip, patch
from tests.faults.table.receivers import HttpReceiver
from tests.faults.table.scenario import Scenario

KIND = "kill -9"


def connect(run):
    run.config["exporters"][run.exporter].update(HttpReceiver.configure(run.receiver))


def kill_and_restart(*pauses, at=None):
    """Kills and restarts the agent after each pause. The receiver is up during the last run."""

    def fault(run):
        for pause in pauses:
            time.sleep(pause)
            if at:
                at(run)
            run.kill()
            if pause is pauses[-1]:
                connect(run)
            run.restart()
        time.sleep(2)

    return fault


def reload_first(run):
    run.reload()
    time.sleep(0.02)


def stop_first(run):
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)


def freeze_first(run):
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(1)


def then_damage(change):
    def fault(run):
        time.sleep(3)
        run.kill()
        patch(0.3, change)(run, run.segments)
        connect(run)
        run.restart()
        time.sleep(2)

    return fault


def one(name, fault, receiver=AwayReceiver, **more):
    return Scenario(KIND, f"killed {name}", fault, receiver, spool=True, others="killed", **more)


SCENARIOS = [
    one("after 3 s, with an unreachable receiver", kill_and_restart(3)),
    one("after 3 s, with a reachable receiver", kill_and_restart(3), HttpReceiver),
    one("five times, each after 0.5 to 3 s", kill_and_restart(0.5, 1.1, 1.7, 2.3, 3)),
    one("while it reloads", kill_and_restart(2.2, at=reload_first)),
    one("while it stops", kill_and_restart(2.4, at=stop_first)),
    one("while it is frozen", kill_and_restart(2.6, at=freeze_first)),
    one("with a spool that is never synced", kill_and_restart(2.8),
        exporter={"sending_queue": {"fsync": "never"}}),
    one("and restarted with a flipped byte in its spool", then_damage(flip)),
]  # fmt: skip
