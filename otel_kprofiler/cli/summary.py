"""Summarizes a recording: samples recorded and lost, and what to do next."""

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from otel_kprofiler.analysis import sum_locks
from otel_kprofiler.cli.completeness import Completeness
from otel_kprofiler.cli.output import Output
from otel_kprofiler.cli.report_text import describe_locks
from otel_kprofiler.cli.sending import Sending
from otel_kprofiler.cli.session import Session
from otel_kprofiler.cli.terminal import describe_count
from otel_kprofiler.cli.unresolved import UnresolvedFrames
from otel_kprofiler.errors import describe_status
from otel_kprofiler.model import ON_CPU, Account, Losses, Window
from otel_kprofiler.sampling import HeldCommand

_BUSY_SHARE: Final = 0.01
"""Fraction of CPU time below which a recording contains hardly any work."""


def summarize(session: Session, output: Output, windows: Sequence[Window]) -> Iterator[str]:
    """Yields a summary: missing names and callers, sample counts, and what to do next."""
    account = session.pipeline.account()
    count = sum(window.sample_count for window in windows)
    seconds = sum(window.end_unix_ns - window.start_unix_ns for window in windows) / 1e9
    unresolved = UnresolvedFrames.of_windows(windows)
    completeness = Completeness.of_windows(windows)
    parts = [
        describe_count(count, "sample"),
        describe_count(_count_processes(windows), "process", "processes"),
        describe_count(_count_cpus(windows), "CPU"),
        f"{seconds:.1f} s",
        f"lost {describe_losses(account.lost)}",
        f"unresolved {unresolved}",
    ]
    if completeness.share is not None:
        parts.append(f"{completeness.share:.1%} of user stacks complete")
    remarks = (
        unresolved.remark(),
        completeness.remark(),
        describe_idle_cpus(windows, session.cpus * seconds),
    )
    yield from filter(None, remarks)
    if locks := sum_locks(profile for window in windows for profile in window.profiles):
        yield describe_locks(locks)
    ended = _end(session, parts, account)
    yield f"wrote {output.path}: {ended}{_next_step(session, output, count)}"


def summarize_sent(session: Session, sending: Sending) -> str:
    """Returns a summary of the samples sent to a receiver."""
    account = Account.of_kinds(session.pipeline.account().kinds, sending.accounts())
    (receiver,) = account.exporters
    parts = [
        f"{receiver.exported:,} of {describe_count(account.taken, 'sample')}",
        f"{session.seconds:.1f} s",
        f"lost {describe_losses(Counter(account.lost) + Counter(receiver.lost) - sending.kept)}",
    ]
    if sending.kept:
        parts.append(f"kept {describe_losses(sending.kept)}")
    return f"sent to {sending.address}: {_end(session, parts, account)}"


def _end(session: Session, parts: list[str], account: Account) -> str:
    by = session.signals.received
    if by:
        parts.insert(0, "interrupted" if by is signal.SIGINT else f"ended by {by.name}")
    if session.held:
        parts += _describe_end(session.held)
    return ", ".join([*parts, *(f"accounting gap: {gap}" for gap in account.gaps())])


def _describe_end(held: HeldCommand) -> list[str]:
    """Describes how the command failed; empty if the command succeeded or was terminated."""
    status = held.poll()
    if held.is_ended or not status:
        return []
    if status > 0:
        return [f"the command exited with status {status}"]
    return [f"the command was killed by {describe_status(status)}"]


def describe_losses(lost: Losses) -> str:
    """Format the number of lost samples for each cause."""
    if not sum(lost.values()):
        return "0"
    return " ".join(f"{count:,} ({cause.value})" for cause, count in lost.items() if count)


def describe_idle_cpus(windows: Sequence[Window], cpu_seconds: float) -> str:
    """Returns a remark if the CPUs were almost always idle and no other sample kind was recorded.

    ``cpu_seconds`` is the duration of the recording times the number of CPUs; 0 if unknown.
    """
    profiles = [profile for window in windows for profile in window.profiles]
    busy_s = sum(profile.measure(profile.weight) for profile in profiles) / 1e9
    has_others = any(profile.kind is not ON_CPU for profile in profiles)
    if has_others or not 0 < busy_s < _BUSY_SHARE * cpu_seconds:
        return ""
    idle = 1 - busy_s / cpu_seconds
    return (
        f"the CPUs were idle for {idle:.1%} of the time; record while your services work, or add "
        "--off-cpu to see where their threads wait"
    )


def _count_processes(windows: Sequence[Window]) -> int:
    attributes = [resource.attributes for window in windows for resource, _ in window.samples]
    return len({(a.get("process.pid"), a.get("process.creation.time")) for a in attributes})


def _count_cpus(windows: Sequence[Window]) -> int:
    return len({sample.cpu for window in windows for _, sample in window.samples})


def _next_step(session: Session, output: Output, count: int) -> str:
    if not count and session.held:
        return " · the command ran for less than a sampling period; raise --rate, or use --off-cpu"
    if not count:
        return " · nothing ran; record for longer, or with --idle"
    return f" · next: {output.next_step}" if output.next_step else ""
