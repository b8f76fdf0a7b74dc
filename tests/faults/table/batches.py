"""Runs scenarios alongside an undisturbed agent and a control program."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.faults.table.programs import build
from tests.faults.table.run import Run
from tests.faults.table.scenario import Scenario
from tests.faults.table.usage import Peak

BASELINE_S = 75
WARM_UP_S = 1.5  # time needed to read the control program's symbols
UNDISTURBED = Scenario("none", "nothing happens", alone=True)


class Batches:
    """Runs scenarios and an undisturbed agent: up to ``together`` at once, host-wide ones alone."""

    def __init__(self, together: int):
        self.together = together
        self._peak = Peak()
        self._baseline, self._baseline_at = {}, 0.0

    def run(self, scenarios: Iterable[Scenario]) -> Iterator[dict]:
        waiting = []
        for scenario in scenarios:
            if scenario.alone:
                yield from self._run_alone(scenario)
            else:
                waiting.append(scenario)
                if len(waiting) == self.together:
                    yield from self._run_together(waiting)
                    waiting = []
        if waiting:
            yield from self._run_together(waiting)

    def close(self) -> None:
        self._peak.stop()

    def _run_together(self, scenarios) -> Iterator[dict]:
        rows = self._run([replace(UNDISTURBED, alone=False), *scenarios])
        for row in rows[1:]:
            yield self._compare(row, rows[0])

    def _run_alone(self, scenario) -> Iterator[dict]:
        if time.monotonic() - self._baseline_at > BASELINE_S:
            (self._baseline,) = self._run([UNDISTURBED])
            self._baseline_at = time.monotonic()
        (row,) = self._run([scenario])
        yield self._compare(row, self._baseline)

    @staticmethod
    def _compare(row, baseline) -> dict:
        """Adds baseline values, and the CPU time relative to the undisturbed agent, to a row."""
        return {
            **row,
            "cpu": row["cpu_share"] / baseline["cpu_share"] if baseline["cpu_share"] else 0.0,
            "baseline_rss_mb": baseline["rss_mb"],
            "baseline_others": baseline["others_kept"],
        }

    def _run(self, scenarios) -> list[dict]:
        with contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
            place.chmod(0o755)
            runs = []
            for number, scenario in enumerate(scenarios):
                (place / str(number)).mkdir()
                runs.append(Run(scenario, place / str(number), self._peak))
                stack.callback(runs[-1].close)
            _each(runs, _begin)
            control = subprocess.Popen(
                [build("control.c")], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
            )
            stack.callback(control.kill)
            time.sleep(WARM_UP_S)
            started = time.monotonic()
            _each(runs, _suffer)
            longest = time.monotonic() - started
            control.send_signal(signal.SIGTERM)
            cpu_ns = int(control.communicate(timeout=30)[0])
            _each(runs, _finish)
            return [_make_row(run, control.pid, cpu_ns / 1e9, longest) for run in runs]


def _each(runs, action) -> None:
    """Calls ``action`` for all runs concurrently. An error affects only the run that raises it."""

    def act(run):
        if run.problems:
            return
        try:
            action(run)
        except Exception as error:  # noqa: BLE001 - a row says what went wrong, and others continue
            run.problems.append(f"{type(error).__name__}: {error}")
            sys.stderr.write(f"{run.scenario.key}\n{traceback.format_exc()}{run.log[-2000:]}\n")

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(act, runs))


def _begin(run) -> None:
    run.scenario.before(run)
    run.launch()
    run.wait_ready()


def _suffer(run) -> None:
    run.measure()
    started = time.monotonic()
    try:
        run.scenario.fault(run)
    finally:
        run.lasted_s = time.monotonic() - started
        if run.process.poll() is None:
            run.end_measuring()
    code = run.process.poll()
    if code is not None:
        raise RuntimeError(f"the agent has exited with {code}")


def _finish(run) -> None:
    run.end_programs()
    if run.scenario.heals:
        run.settle()
    run.stop()


def _make_row(run, control_pid, control_cpu_s, lasted_s) -> dict:
    row = {
        "kind": run.scenario.kind, "name": run.scenario.name, "problems": run.problems,
        "taken": 0, "arrived": 0, "left": 0, "lost": {}, "difference": 0, "others_kept": None,
        "rss_mb": run.peak_bytes / 2**20, "cpu_share": 0.0,
    }  # fmt: skip
    if run.problems:
        return row
    row["cpu_share"] = run.cpu_s / run.lasted_s
    try:
        counts = run.count(control_pid)
    except Exception as error:  # noqa: BLE001 - a row says what went wrong
        sys.stderr.write(f"{run.scenario.key}\n{traceback.format_exc()}\n")
        return {**row, "problems": [f"{type(error).__name__}: {error}"]}
    expected = control_cpu_s * run.config["receivers"]["kprofiler"]["samples_per_second"]
    row.update(counts, expected=expected, lasted_s=lasted_s)
    if not run.scenario.others:
        row["others_kept"] = counts["control"] / expected
        row["others_named"] = counts["named"]
    if not run.scenario.misses:
        del row["missed_share"]
    return row
