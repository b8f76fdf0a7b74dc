"""Runs a scenario's agent, injects the fault, and counts the agent's samples."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from tests.faults.table.payloads import STREAM, Received, lost_of, split
from tests.faults.table.programs import Programs
from tests.faults.table.receivers import FileReceiver
from tests.faults.table.scenario import Scenario
from tests.faults.table.usage import Peak, cpu_seconds
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
RATE = 99
WITNESS = "file/witness"
READY_S, STOP_S, HEALED_S = 90, 90, 20


class Run(Programs):
    """An agent, its directory and receiver, and the programs started by a fault scenario.

    Attributes:
        public: a world-writable directory for other users' files.
        config: the agent's configuration, including changes made by ``write_config``.
        seconds: the intended duration of the fault, in seconds.
        has_moved_spool: whether the last agent uses a different spool and separate counts.
    """

    def __init__(self, scenario: Scenario, directory: Path, peak: Peak):
        super().__init__(directory)
        self.scenario, self.directory, self._peak = scenario, directory, peak
        self.seconds = scenario.seconds
        self.receiver = scenario.receiver()
        if isinstance(self.receiver, FileReceiver):
            self.receiver.place(directory)
        self.exporter, self.health = self.receiver.exporter, free_port()
        self.accounts, self.killed, self.problems = [], 0, []
        self.has_moved_spool = False
        self.cpu_s, self._cpu_from, self.peak_bytes = 0.0, None, 0
        self.config = self._make_config()
        self.process = None

    def _make_config(self) -> dict:
        scenario = self.scenario
        sampler = {
            "samples_per_second": RATE,
            "stacks": "both",
            "user_symbols": "names",
            "send_idle_frames": True,
            "self_profiled": "mark",
            "reporter_interval": "500ms",
            "monitor_interval": "1s",
            "off_cpu": {"enabled": scenario.alone},
        }
        sending = {
            "timeout": "1s",
            "retry_on_failure": {
                "initial_interval": "50ms", "max_interval": "300ms", "max_elapsed_time": "10m",
            },
            "sending_queue": {"storage": str(self.spool)} if scenario.spool else {},
        }  # fmt: skip
        is_file = isinstance(self.receiver, FileReceiver)
        exporter = {**self.receiver.configure(), **({} if is_file else sending)}
        witness = {"path": str(self.witness), "format": "proto"}
        service = {
            "shutdown_timeout": "30s",
            "health": {"endpoint": f"127.0.0.1:{self.health}"},
            "telemetry": {"metrics": {"level": "none"}},
        }
        pipeline = {"receivers": ["kprofiler"], "exporters": [self.exporter, WITNESS]}
        return {
            "receivers": {"kprofiler": merge(sampler, scenario.sampler)},
            "exporters": {self.exporter: merge(exporter, scenario.exporter), WITNESS: witness},
            "service": {**merge(service, scenario.service), "pipelines": {"profiles": pipeline}},
        }

    @property
    def spool(self) -> Path:
        return self.directory / "spool"

    @property
    def segments(self) -> list[Path]:
        """The spool's segments, oldest first."""
        return sorted(self.spool.glob("*/*.spool"))

    @property
    def witness(self) -> Path:
        """The path of an output file that no fault affects."""
        return self.directory / "witness.otlp"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def config_path(self) -> Path:
        return self.directory / "agent.yaml"

    def write_config(self) -> None:
        self.config_path.write_text(json.dumps(self.config, indent=1))

    def reload(self) -> None:
        self.write_config()
        self.process.send_signal(signal.SIGHUP)

    def launch(self) -> None:
        self.write_config()
        outputs = self.scenario.outputs(self)
        with (self.directory / "log").open("ab") as log, (self.directory / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "otel_kprofiler", "run", "-c", self.config_path],
                cwd="/", stdin=subprocess.DEVNULL,
                stdout=outputs.get("stdout", out), stderr=outputs.get("stderr", log),
                env={**os.environ, **self.scenario.environment(self)},
            )  # fmt: skip
        self._peak.add(self.process.pid)

    def wait_ready(self) -> None:
        self.wait_until(lambda: (self.get_status() or {}).get("status") == "sampling", READY_S)

    def wait_until(self, condition, seconds: float, what="it is ready") -> None:
        """Waits for a condition, or raises TimeoutError, or RuntimeError if the agent exits."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the agent has exited with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {seconds} s; expected: {what}")
            time.sleep(0.1)

    def get_status(self) -> dict | None:
        """Returns the health endpoint's response, if any arrives within two seconds."""
        url = f"http://127.0.0.1:{self.health}/status"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return json.load(answer)
        return None

    def measure(self) -> None:
        self._cpu_from = cpu_seconds(self.process.pid)

    def end_measuring(self) -> None:
        if self._cpu_from is not None:
            self.cpu_s += cpu_seconds(self.process.pid) - self._cpu_from
            self._cpu_from = None

    def settle(self) -> None:
        """Restores the receiver, and waits until all queued data has arrived."""
        self.receiver.heal()

        def is_settled():
            status = self.get_status()
            return status and not status["account"]["exporters"][self.exporter]["pending"]

        with contextlib.suppress(TimeoutError):
            self.wait_until(is_settled, HEALED_S)

    def stop(self) -> None:
        self.end_measuring()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        self._note_peak()
        if code:
            raise RuntimeError(f"the agent has exited with {code}")
        lines = (self.directory / "out").read_bytes().splitlines()
        self.accounts.append(json.loads(lines[-1])["account"])

    def kill(self) -> None:
        self.end_measuring()
        self.process.kill()
        self.process.wait()
        self._note_peak()
        self.killed += 1

    def restart(self) -> None:
        self.launch()
        self.wait_ready()
        self.measure()

    def close(self) -> None:
        self.end_programs()
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.receiver.close()
        for undo in reversed(self._at_close):
            undo()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._peak.bytes[self.process.pid])

    def count(self, control_pid: int) -> dict:
        """Compares the data in the receiver and the witness file with all reported counts."""
        received = {
            self.exporter: Received(self.receiver.payloads, control_pid),
            WITNESS: Received(split(self.witness.read_bytes()), control_pid),
        }
        mine, witness = received[self.exporter], received[WITNESS]
        taken, arrived, rest, lost, difference = 0, 0, 0, Counter(), 0
        for kind in self.accounts[-1]:
            for name, got in received.items():
                figures = self._compare(kind, name, got)
                difference += figures["difference"]
                if name == self.exporter:
                    taken += figures["taken"]
                    arrived += got.sum(kind)
                    rest += figures["rest"]
                    lost += figures["lost"]
        return {
            "taken": taken, "arrived": arrived, "left": rest, "lost": dict(+lost),
            "difference": difference, "streams": len(witness.streams("on_cpu")),
            "control": witness.control, "missed_share": witness.missed_share,
            "named": witness.named, "at_receiver": mine.control,
        }  # fmt: skip

    def _compare(self, kind, exporter, got) -> dict:
        """Returns an exporter's counts for a sample kind, and the size of any discrepancy.

        Samples are compared with the printed counts, and with the counts in the data if the data is
        complete. The end of a stream may be missing because the spool was corrupted between two
        runs, or because the receiver was down.
        """
        taken, rest, before, later = 0, 0, Counter(), Counter()
        gaps = 0
        for account in (account[kind] for account in self.accounts if kind in account):
            own = account["exporters"].get(exporter, {"lost": {}, "not_offered": 0})
            taken += account["taken"]
            before += Counter(account["lost"])
            later += Counter(own["lost"])
            rest += account["waiting"] + own["not_offered"]
            gaps += len(account["gaps"])
        for stream in got.streams(kind)[: self.killed]:
            # A killed agent prints no counts, so the last counts received from it are used.
            taken += got.accounts[kind, stream][STREAM + "samples"]
            later += lost_of(got.accounts[kind, stream])
        rest += self.accounts[-1][kind]["exporters"].get(exporter, {"pending": 0})["pending"]
        arrived = got.sum(kind)
        seen = taken - sum(before.values()) - arrived - rest
        difference = abs(seen - sum(later.values())) + gaps
        streams = got.streams(kind)
        last = self.accounts[-1][kind]["taken"]
        complete = streams and got.accounts[kind, streams[-1]][STREAM + "taken"] == last
        reachable = self.scenario.heals and streams and len(self.accounts) + self.killed == 1
        if not rest and not self.has_moved_spool and (complete or reachable):
            difference += abs(got.missing(kind))
        return {"taken": taken, "rest": rest, "lost": before + later, "difference": difference}


def merge(base: dict, changes: dict) -> dict:
    """Returns a copy of a nested dictionary, updated recursively with ``changes``."""
    result = dict(base)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if inner else value
    return result
