"""Defines scenarios: a fault, a receiver and an agent configuration."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.faults.table.receivers import HttpReceiver

if TYPE_CHECKING:
    from tests.faults.table.run import Run

SECONDS = 4.0


def wait(run: Run) -> None:
    time.sleep(run.seconds)


def beside(start: Callable[[Run], object]) -> Callable[[Run], None]:
    """Returns a fault that calls ``start``, whose effect lasts until the scenario ends."""

    def fault(run: Run) -> None:
        start(run)
        wait(run)

    return fault


def repeatedly(action: Callable[[Run], object], pause_s: float = 0.0) -> Callable[[Run], None]:
    """Returns a fault that repeats an action for the duration of the scenario."""

    def fault(run: Run) -> None:
        end = time.monotonic() + run.seconds
        while time.monotonic() < end:
            action(run)
            time.sleep(pause_s)
        time.sleep(1)

    return fault


@dataclass(frozen=True)
class Scenario:
    """A fault, and the agent that is exposed to it.

    Attributes:
        kind: the section of the table that lists the scenario.
        name: a description, unique within its kind.
        fault: called when the agent has started sampling. The measurement ends when the call
            returns.
        receiver: opens the receiver, which recovers after the fault.
        before: called before the agent starts.
        sampler, exporter, service: settings that are merged into the agent's configuration.
        spool: whether the exporter queues on disk.
        heals: whether the receiver recovers, and receives the queued data, before the agent stops.
        alone: whether the scenario must not run while other agents are running on the host.
        others: why the control program cannot measure the effect on other processes' samples
            (such as a restart); empty if it can.
        misses: whether the fault causes the kernel to miss samples of all programs; the agent must
            count these samples as missed.
        seconds: the duration of the fault, in seconds.
        outputs: returns replacements for the agent's ``stdout`` and ``stderr``, given the run.
        environment: returns additional environment variables for the agent, given the run.
    """

    kind: str
    name: str
    fault: Callable[[Run], None] = wait
    receiver: Callable[[], Any] = HttpReceiver
    before: Callable[[Run], None] = lambda _: None
    sampler: Mapping[str, Any] = field(default_factory=dict)
    exporter: Mapping[str, Any] = field(default_factory=dict)
    service: Mapping[str, Any] = field(default_factory=dict)
    spool: bool = False
    heals: bool = True
    alone: bool = False
    others: str = ""
    misses: bool = False
    seconds: float = SECONDS
    outputs: Callable[[Run], dict[str, Any]] = lambda _: {}
    environment: Callable[[Run], dict[str, str]] = lambda _: {}

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.name}"


def load() -> list[Scenario]:
    kinds = importlib.import_module("tests.faults.table.kinds")
    scenarios = []
    for module in sorted(pkgutil.iter_modules(kinds.__path__), key=lambda module: module.name):
        scenarios += importlib.import_module(f"{kinds.__name__}.{module.name}").SCENARIOS
    keys = [scenario.key for scenario in scenarios]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"registered twice: {twice}"
    return scenarios
