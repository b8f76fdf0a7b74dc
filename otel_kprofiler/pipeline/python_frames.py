"""Python frames of a running sampler: which processes they are read of, and why not of others."""

from __future__ import annotations

import logging
import os
from typing import Final

from otel_kprofiler.bpf import PythonMaps
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import Access
from otel_kprofiler.interpreters import (
    Interpreter,
    InterpreterRefused,
    PythonTracking,
    open_own,
)
from otel_kprofiler.model import KnownLoops
from otel_kprofiler.sampling import EbpfSampler

NOT_STARTED: Final = "sampling has not started"
OFF: Final = "python_frames is 0"
NO_ROOM: Final = "too many processes are registered"

_log = logging.getLogger(__name__)


class PythonFrames:
    """Registers the CPython processes that a sampler samples.

    If that is this process alone, its interpreter is proved, and no other process is looked at.
    Otherwise a thread follows processes as they come and go. :meth:`describe` is thread-safe; other
    methods belong to the thread of the pipeline.

    Args:
        sampler: its settings tell which processes it samples.
        files: this host's.
        loops: gets the evaluation loops of the interpreters.
    """

    def __init__(self, sampler: EbpfSampler, files: Access, loops: KnownLoops) -> None:
        self._sampler = sampler
        self._loops = loops
        self._files = files
        self._maps: PythonMaps | None = None
        self._tracking: PythonTracking | None = None
        self._problem = NOT_STARTED

    def start(self) -> None:
        """Register processes; call when the sampler has started. Problems are logged."""
        self._maps = self._sampler.python
        self._problem = self._sampler.python_problem or ""
        if self._maps is None:
            self._problem = self._problem or OFF
            return
        config = self._sampler.config
        if config.target_pids == (os.getpid(),) and not config.target_descendants:
            self._problem = self._register_own(self._maps)
            if self._problem:
                _log.warning("stacks have no Python frames: %s", self._problem)
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
        """State and counts as plain values, for JSON.

        Keys: ``problem`` (why there are no Python frames, else empty), ``stacks`` (what came of
        Python stacks and of descriptions of code objects, by outcome) and, of several processes,
        ``processes``, ``without_room`` and ``refused`` (interpreters, by reason).
        """
        found: dict[str, object] = {"problem": self._problem}
        if self._maps is not None:
            found["stacks"] = dict(self._maps.counts())
        if self._tracking is not None:
            found |= self._tracking.counts().as_dict()
        return found

    def close(self) -> None:
        """Look at no further processes; idempotent."""
        tracking, self._tracking = self._tracking, None
        if tracking is not None:
            tracking.close()

    def _register_own(self, maps: PythonMaps) -> str:
        """Register this process; why it could not be, else empty."""
        try:
            own = open_own()
            self._add_loop(own.interpreter)
            done = maps.register(os.getpid(), own.interpreter.layout, own.process)
        except (InterpreterRefused, OSError) as error:
            return describe_error(error)
        return "" if done else NO_ROOM

    def _add_loop(self, found: Interpreter) -> None:
        self._loops.add(found.build_id, found.eval_loop)
