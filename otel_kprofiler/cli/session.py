"""Records until the time limit is reached, the command exits, or a signal arrives."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Final

from otel_kprofiler.cli.end_signals import EndSignals
from otel_kprofiler.cli.progress import Progress
from otel_kprofiler.cli.target_filters import Targets
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.pipeline import DRAIN_INTERVAL_S, Pipeline
from otel_kprofiler.recording import ReplaySampler
from otel_kprofiler.sampling import EbpfSampler, HeldCommand

_GRACE_S: Final = 5.0


@dataclass(slots=True)
class Session:
    """A recording and its outcome.

    Attributes:
        pipeline: collects and delivers the samples; closed at the end of :meth:`run`.
        targets: the recorded processes; None if they were not selected by options.
        seconds: duration of the recording so far.
        cpus: number of CPUs on which all processes are sampled; 0 if processes were selected.
    """

    pipeline: Pipeline[EbpfSampler] | Pipeline[ReplaySampler]
    signals: EndSignals
    held: HeldCommand | None = None
    targets: Targets | None = None
    seconds: float = 0.0
    cpus: int = 0

    def run(self, limit_s: float | None, progress: Progress) -> None:
        """Sample until the time limit is reached, the command exits, or a signal arrives."""
        try:
            self.signals.listen(self.pipeline.wake)
            self.pipeline.start()
            sampler = self.pipeline.sampler
            if isinstance(sampler, EbpfSampler) and not self.targets:
                self.cpus = len(sampler.cpus)
            started = time.monotonic()
            if self.held:
                self.held.release()
            while not self.signals.received and not self._has_ended():
                self.seconds = time.monotonic() - started
                left = DRAIN_INTERVAL_S if limit_s is None else limit_s - self.seconds
                if left <= 0:
                    break
                self.pipeline.step(min(left, DRAIN_INTERVAL_S))
                progress.update(self.seconds, self.pipeline.account())
            self._end_command()
            self.pipeline.stop()
            self.seconds = time.monotonic() - started
        finally:
            self.pipeline.close()

    def wait_for_command(self) -> None:
        """Wait for a command that the recording terminated, and kill it if it does not exit."""
        if self.held and self.held.is_ended and self.held.kill_after(_GRACE_S):
            say(f"the command did not end within {_GRACE_S:.0f} s and was killed", err=True)

    @property
    def exit_status(self) -> int:
        """Returns the command's exit status, as in shells, if it exited by itself; otherwise 0."""
        status = self.held.poll() if self.held and not self.held.is_ended else 0
        return 128 - status if status and status < 0 else status or 0

    def _has_ended(self) -> bool:
        if self.held:
            return self.held.poll() is not None
        sampler = self.pipeline.sampler
        if self.targets and isinstance(sampler, EbpfSampler):
            return self.targets.have_ended(sampler)
        return False

    def _end_command(self) -> None:
        if self.held:
            by = self.signals.received
            has_signal = by is signal.SIGINT and _is_in_foreground()
            self.held.terminate(None if has_signal else by or signal.SIGTERM)


def _is_in_foreground() -> bool:
    """Returns whether Ctrl-C at the terminal sends SIGINT to this process and its command."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
