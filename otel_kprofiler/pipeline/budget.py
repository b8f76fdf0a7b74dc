"""Limits how much of the pipeline thread's time is spent on each process."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final, Protocol, TypeVar, cast

from otel_kprofiler.host import CpuShare
from otel_kprofiler.model import (
    COARSE,
    KERNEL_SIDE,
    STACK_OVER_BUDGET,
    LabelSet,
    RawSample,
    Resource,
    Stack,
)

SHARE: Final = 0.1
"""A process's long-term fraction of the pipeline thread's time, after a burst of one second."""
GROUP_SHARE: Final = 0.3
"""Long-term fraction of the pipeline thread's time for all of a user's young processes in a cgroup
combined, after a burst of one second. All the user's older processes in the cgroup together receive
another fraction of this size, after a burst of five seconds."""
YOUNG_NS: Final = 10_000_000_000
"""Maximum age of a young process, in nanoseconds."""
ROOT_CGROUP_ID: Final = 1
"""Inode number of the cgroup v2 root, which contains all processes if only cgroup v1 is used. Older
processes in the root are not grouped; otherwise, all services of a user would share one budget."""
_OLD_BURST_NS: Final = 5_000_000_000
"""Burst for a group of older processes; enough for all processes running when the agent starts."""
_LONGEST_NS: Final = 100_000_000
"""Maximum charge for identifying a program, which takes less than a millisecond of CPU time. Any
excess is attributed to the host being paused, and is not charged."""
GROUP_NS: Final = 50_000
"""Cost of closing and encoding a group of equal samples, charged when the group is added."""
CONTEXT_BYTE_NS: Final = 300
"""Cost of a group per byte of its thread context; the minimum per group is ``GROUP_NS``."""
MAX_PROCESSES: Final = 4096
"""Maximum number of processes, and of groups, whose costs are tracked."""
COARSE_LABELS: Final[LabelSet] = ((COARSE, "true"),)
_MAX_COMM: Final = 15

_PROGRAM: Final = attrgetter(
    "kind", "tgid", "start_time_ns", "cgroup_id", "exec_id", "owner", "stack_start"
)

KeyT = TypeVar("KeyT")


class Stacks(Protocol):
    """Resolves stacks; see :class:`~otel_kprofiler.symbols.StackResolver`."""

    def find_all(self, samples: list[RawSample], *, makes: bool = True) -> list[Stack | None]:
        """Returns each sample's stack if it is cached or, if ``makes``, its frames are cached."""

    def resolve(self, sample: RawSample) -> Stack:
        """Resolve a sample's stack with the symbols that were valid at the time of the sample."""

    def advance(self, now_boot_ns: int) -> int:
        """Applies symbol changes; returns the ``CLOCK_BOOTTIME`` up to which they are complete."""

    def finish(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for pending symbols."""

    def close(self) -> None:
        """Release all resources."""


class Resources(Protocol):
    """Finds Resources for processes; see :class:`~otel_kprofiler.processes.ProcessResources`."""

    def get(self, sample: RawSample) -> Resource:
        """Returns the Resource for the sample's process."""

    def find(self, sample: RawSample) -> Resource | None:
        """Returns the Resource for the sample's process if it is cached, otherwise None."""

    def find_newest(self, sample: RawSample) -> Resource | None:
        """Returns the process's latest Resource, whichever program it ran; may be None."""

    def get_shared(self, sample: RawSample) -> Resource:
        """Returns the Resource shared by processes whose attributes are not read."""


class ProcessBudgets:
    """Resolves samples, and charges each process for the time spent on its samples.

    Every sample from a process can cause a lot of work if the process constantly changes its thread
    names, stacks, code or programs. Processes are charged for wall-clock time, so budgets
    effectively shrink when CPU time is scarce. The samples of a process that exceeds its budget
    lose detail, so that they do not delay other processes' samples.

    Charges also count against the group of processes with the same user and cgroup, so that a
    parent gains nothing by forking children. Young processes form a separate group, so that a fork
    storm does not use up the budget of the same user's services.

    Not thread-safe, except for :attr:`coarse`.

    Args:
        is_limiting: whether to limit processes to their budgets.
        now_ns: returns the time of a monotonic clock, in nanoseconds.

    Attributes:
        coarse: counts of samples whose detail was reduced, by kind of reduction. ``resource``: the
            sample carries the Resource of the process's previous program, or a Resource shared by
            new processes. ``stack``: the stack has no user frames, and the status ``over_budget``.
            ``group``: the sample carries the executable's name and the process id (0 if the
            Resource is shared) instead of the thread's name and id, and has no span or labels.
    """

    def __init__(
        self,
        stacks: Stacks,
        resources: Resources,
        *,
        is_limiting: bool = True,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._stacks, self._resources = stacks, resources
        self._is_limiting = is_limiting
        self._now_ns = now_ns
        # Oldest entry first.
        self._shares: dict[int, CpuShare] = {}  # by process id
        self._groups: dict[tuple[int | None, int, bool], CpuShare] = {}
        self.coarse: Counter[str] = Counter({"resource": 0, "stack": 0, "group": 0})

    def resolve(self, samples: list[RawSample]) -> tuple[list[Stack], Resource]:
        """Returns the stacks and the Resource for samples of one program."""
        resource = self._resources.find(samples[0]) or self._identify(samples[0])
        stacks = self._find(samples)
        left = [at for at, stack in enumerate(stacks) if stack is None]
        if left:
            first, *others = left
            stacks[first] = self._resolve(samples[first])
            # The other stacks may need nothing that is not cached now.
            again = self._find([samples[at] for at in others])
            for at, stack in zip(others, again, strict=True):
                stacks[at] = stack or self._resolve(samples[at])
        return cast(list[Stack], stacks), resource

    def _find(self, samples: list[RawSample]) -> list[Stack | None]:
        """Finds stacks in caches; makes no new stacks for a process that exceeds its budget."""
        if not (self._is_limiting and samples):
            return self._stacks.find_all(samples)
        began_ns = self._now_ns()
        shares = self._get_shares(samples[0])
        if _is_spent(shares, began_ns):
            return self._stacks.find_all(samples, makes=False)
        stacks = self._stacks.find_all(samples)
        _spend(shares, self._now_ns() - began_ns)
        return stacks

    def _resolve(self, sample: RawSample) -> Stack:
        if not self._is_limiting:
            return self._stacks.resolve(sample)
        began_ns = self._now_ns()
        shares = self._get_shares(sample)
        if _is_spent(shares, began_ns):
            self.coarse["stack"] += 1
            sample = _without_user_frames(sample)
        stack = self._stacks.resolve(sample)
        _spend(shares, self._now_ns() - began_ns)
        return stack

    def identify(self, samples: Iterable[RawSample]) -> None:
        """Find the Resources of sampled processes while the processes are still running."""
        for sample in {_PROGRAM(sample): sample for sample in samples}.values():
            if self._resources.find(sample) is None:
                self._identify(sample)

    def _identify(self, sample: RawSample) -> Resource:
        began_ns = self._now_ns()
        shares = self._get_shares(sample) if self._is_limiting else ()
        if _is_spent(shares, began_ns):
            self.coarse["resource"] += 1
            return self._resources.find_newest(sample) or self._resources.get_shared(sample)
        resource = self._resources.get(sample)
        _spend(shares, min(self._now_ns() - began_ns, _LONGEST_NS))
        return resource

    def admit(self, sample: RawSample, resource: Resource) -> bool:
        """Charge a process for a group of samples. Return False if the process exceeds its budget.

        Also returns False if several processes share the Resource, because a shared Resource cannot
        describe the threads of a single process.
        """
        if not self.admits(sample, resource):
            self.coarse["group"] += 1
            return False
        self.charge_groups(sample)
        return True

    def admits(self, sample: RawSample, resource: Resource) -> bool:
        """Returns whether :meth:`admit` would return True, without charging the process."""
        if not self._is_limiting:
            return True
        is_shared = resource.attributes.get(COARSE) is True
        return not is_shared and not _is_spent(self._get_shares(sample), self._now_ns())

    def charge_groups(self, sample: RawSample, count: int = 1) -> None:
        """Charge a process for groups of samples with contexts as large as the sample's."""
        if self._is_limiting:
            cost_ns = max(GROUP_NS, CONTEXT_BYTE_NS * len(sample.context))
            _spend(self._get_shares(sample), count * cost_ns)

    def _get_shares(self, sample: RawSample) -> tuple[CpuShare, ...]:
        share = self._shares.get(sample.tgid)
        if share is None:
            share = _keep(self._shares, sample.tgid, CpuShare(SHARE))
        start_ns = sample.start_time_ns
        is_young = start_ns is not None and sample.time_ns - start_ns < YOUNG_NS
        if not is_young and sample.cgroup_id == ROOT_CGROUP_ID:
            return (share,)
        key = sample.owner, sample.cgroup_id, is_young
        group = self._groups.get(key)
        if group is None:
            burst = () if is_young else (_OLD_BURST_NS,)
            group = _keep(self._groups, key, CpuShare(GROUP_SHARE, *burst))
        return share, group


def split_programs(samples: Iterable[RawSample]) -> list[list[RawSample]]:
    """Splits samples by their program and kind, in the order of the first sample of each."""
    programs: dict[object, list[RawSample]] = {}
    for sample in samples:
        programs.setdefault(_PROGRAM(sample), []).append(sample)
    return list(programs.values())


def _keep(shares: dict[KeyT, CpuShare], key: KeyT, share: CpuShare) -> CpuShare:
    shares[key] = share
    if len(shares) > MAX_PROCESSES:
        del shares[next(iter(shares))]
    return share


def _is_spent(shares: tuple[CpuShare, ...], now_ns: int) -> bool:
    for share in shares:  # noqa: SIM110 - any() takes three times as long
        if share.is_spent(now_ns):
            return True
    return False


def _spend(shares: tuple[CpuShare, ...], cost_ns: int) -> None:
    for share in shares:
        share.spend(cost_ns)


def name_coarse_thread(resource: Resource) -> bytes:
    """Returns the thread name for samples of a process over its budget: the executable's name."""
    name = str(resource.attributes.get("process.executable.name", ""))
    return name.encode("utf-8", "surrogateescape")[:_MAX_COMM]


def _without_user_frames(sample: RawSample) -> RawSample:
    """Returns a sample with only its kernel stack; other stacks are marked as over budget."""
    sides = list(zip(sample.collected, sample.stacks, strict=True))
    return sample._replace(
        collected=tuple(
            [side if side[0] is KERNEL_SIDE else (side[0], STACK_OVER_BUDGET) for side, _ in sides]
        ),
        stacks=tuple([words if side[0] is KERNEL_SIDE else b"" for side, words in sides]),
    )
