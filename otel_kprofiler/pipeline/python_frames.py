"""Selects processes whose Python frames are read, and reports why other processes are excluded."""

import logging
import os
from collections import Counter
from typing import Final

from otel_kprofiler.bpf import PythonMaps
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import Access
from otel_kprofiler.interpreters import (
    Interpreter,
    InterpreterRefused,
    PythonCounts,
    PythonTracking,
    open_own,
)
from otel_kprofiler.model import KnownLoops
from otel_kprofiler.sampling import EbpfSampler
from otel_kprofiler.text import describe_count

NOT_STARTED: Final = "sampling has not started"
OFF: Final = "python_frames is 0"
NO_ROOM: Final = "too many processes are registered"
_REFUSED_STACKS: Final = {
    "interpreters": "the thread's interpreter is unknown",
    "threads": "too many threads",
}
_READ_STACKS: Final = {"complete", "truncated"}
_FAILED_STACKS: Final = (
    "other_image", "interpreters", "threads", "entering", "unrooted", "unreadable", "not_code",
    "outside", "not_running", "unused", "not_adjacent",
)  # fmt: skip
"""Outcomes of failed Python stack reads. A warning is logged if no read succeeds."""
_MANY_STACKS: Final = 20

_log = logging.getLogger(__name__)


class PythonFrames:
    """Registers the CPython processes that a sampler samples.

    If only the current process is sampled, its interpreter is verified, and no other process is
    examined. Otherwise, a thread tracks processes as they start and exit. Only the pipeline's
    thread may call methods other than :meth:`describe` and :meth:`remarks`, which are thread-safe.

    Args:
        sampler: the sampler, whose settings select the processes.
        loops: receives the address ranges of the interpreters' evaluation loops.
    """

    def __init__(self, sampler: EbpfSampler, files: Access, loops: KnownLoops) -> None:
        self._sampler = sampler
        self._loops = loops
        self._files = files
        self._maps: PythonMaps | None = None
        self._tracking: PythonTracking | None = None
        self._tracked: PythonCounts | None = None
        self._problem = NOT_STARTED
        self._is_own = self._warned = False

    def start(self) -> None:
        """Register processes and log problems. Call this after starting the sampler."""
        self._maps = self._sampler.python
        self._problem = self._sampler.python_problem or ""
        if self._maps is None:
            self._problem = self._problem or OFF
            return
        config = self._sampler.config
        if config.target_pids == (os.getpid(),) and not config.target_descendants:
            self._problem = self._register_own(self._maps)
            self._is_own = not self._problem
            if self._problem:
                _log.warning("stacks will have no Python frames: %s", self._problem)
            return
        command = () if config.child_pid is None else (config.child_pid,)
        self._tracking = PythonTracking(
            self._maps,
            config.target_pids or command,
            children=config.target_descendants or bool(command),
            files=self._files,
            on_found=self._add_loop,
        )
        self._tracking.start()

    def describe(self) -> dict[str, object]:
        """Returns the state and counts of Python frames as plain values for JSON.

        ``problem`` states why Python frames are not read; it is empty if they are. ``stacks``
        counts Python stacks and code-object descriptions, by outcome. If several processes are
        sampled, the result also contains the fields of :class:`PythonCounts`.
        """
        state: dict[str, object] = {"problem": self._problem}
        if self._maps is not None:
            state["stacks"] = dict(self._maps.counts())
        tracked = self._count_tracked()
        if tracked is not None:
            state |= tracked.as_dict()
        return state

    def remarks(self) -> list[str]:
        """Lists reasons why Python frames were not read. Thread-safe, even after :meth:`close`."""
        lines = []
        tracked = self._count_tracked()
        if tracked is not None:
            lines = [
                f"Python frames of {describe_count(count, 'process', 'processes')} not read: "
                f"{reason.value}"
                for reason, count in tracked.refused_processes.items()
            ]
            if tracked.without_room:
                count = describe_count(tracked.without_room, "process", "processes")
                lines.append(f"Python frames of {count} not read: {NO_ROOM}")
        stacks = self._maps.counts() if self._maps is not None else {}
        for outcome, reason in _REFUSED_STACKS.items():
            if stacks.get(outcome):
                count = describe_count(stacks[outcome], "stack")
                lines.append(f"Python frames of {count} not read: {reason}")
        return lines

    def look(self) -> None:
        """Warn, once, if no stacks from this process have contained Python frames."""
        if self._maps is None or not self._is_own or self._warned:
            return
        counts = self._maps.counts()
        failed = Counter({name: counts.get(name, 0) for name in _FAILED_STACKS})
        if failed.total() >= _MANY_STACKS and not counts.keys() & _READ_STACKS:
            self._warned = True
            outcomes = ", ".join(f"{name} {count}" for name, count in failed.items() if count)
            _log.warning("no stack has Python frames so far (%s)", outcomes)

    def close(self) -> None:
        """Stop examining processes; idempotent."""
        tracking, self._tracking = self._tracking, None
        if tracking is not None:
            tracking.close()
            self._tracked = tracking.counts()

    def _count_tracked(self) -> PythonCounts | None:
        tracking = self._tracking
        return self._tracked if tracking is None else tracking.counts()

    def _register_own(self, maps: PythonMaps) -> str:
        """Register this process. Returns the reason for a failure; empty on success."""
        try:
            agent_process = open_own()
            self._add_loop(agent_process.interpreter)
            done = maps.register(
                os.getpid(), agent_process.interpreter.layout, agent_process.process
            )
        except (InterpreterRefused, OSError) as error:
            return describe_error(error)
        return "" if done else NO_ROOM

    def _add_loop(self, interpreter: Interpreter) -> None:
        self._loops.add(interpreter.build_id, interpreter.eval_loop)
