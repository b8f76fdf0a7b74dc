"""Limits the cost of a process for the thread that handles all samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

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
from otel_kprofiler.processes import ProcessResources
from otel_kprofiler.symbols import StackResolver

SHARE: Final = 0.1
"""Long-term share of the thread's time for a process, after a burst of a second."""
GROUP_SHARE: Final = 0.3
"""Part that the young processes of one user in one cgroup may take together, after a second in one
go; and part that the others may take, after five."""
YOUNG_NS: Final = 10_000_000_000
"""Age up to which a process is young."""
ROOT_CGROUP_ID: Final = 1
"""Inode of the root of cgroup v2. On hosts with cgroup v1 alone all processes are in it, so its old
processes are no group: all services of a user would have a budget together."""
_OLD_BURST_NS: Final = 5_000_000_000
"""Enough to meet all that run when the agent starts."""
GROUP_NS: Final = 50_000
"""Later cost of a group of equal samples: closing and encoding its window."""
CONTEXT_BYTE_NS: Final = 300
"""The same by bytes of its thread context, whose attributes are decoded and encoded, if more."""
MAX_PROCESSES: Final = 4096
"""Processes whose cost is remembered, and groups of them; others start anew."""
COARSE_LABELS: Final[LabelSet] = ((COARSE, "true"),)
_MAX_COMM: Final = 15

KeyT = TypeVar("KeyT")


class ProcessBudgets:
    """Resolves samples, and charges each process for new work.

    What is new costs the most: a program to identify, a stack to resolve, a group of samples that
    differs from all others of the window. A process that changes its thread names, stacks, code or
    programs all the time can make each sample new. It pays with the time that this takes, measured
    in wall-clock time, so that the budget is smaller in effect where CPU time is scarce. Above its
    budget, its own samples are coarser, and those of others wait for none of it.

    What a process pays, the processes of its user and cgroup pay with it, so that a parent gains
    nothing by children: each child would start with a budget. Young processes are a group apart, so
    that a storm of them takes nothing from services of the same user.

    Belongs to one thread, except :attr:`coarse`.

    Args:
        stacks: resolves stacks.
        resources: finds the Resource of a process.
        is_limiting: whether processes have budgets.
        now_ns: any steady clock, in nanoseconds.

    Attributes:
        coarse: number of samples so far by what is coarse: ``resource`` (it is that of the program
            that the process ran before, or shared by new processes), ``stack`` (user sides have
            no frames, with the status ``over_budget``), ``group`` (the thread is called like the
            executable, and has the number of the process, or 0 if the Resource is shared; without
            span and labels).
    """

    def __init__(
        self,
        stacks: StackResolver,
        resources: ProcessResources,
        *,
        is_limiting: bool = True,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._stacks, self._resources = stacks, resources
        self._is_limiting = is_limiting
        self._now_ns = now_ns
        # The longest known first
        self._shares: dict[int, CpuShare] = {}  # by process id
        self._groups: dict[tuple[int | None, int, bool], CpuShare] = {}
        self.coarse: Counter[str] = Counter({"resource": 0, "stack": 0, "group": 0})

    def resolve(self, sample: RawSample) -> tuple[Stack, Resource]:
        """The stack and the Resource of a sample."""
        if not self._is_limiting:
            return self._stacks.resolve(sample), self._resources.get(sample)
        stack, resource = self._stacks.find(sample), self._resources.find(sample)
        if stack is not None and resource is not None:
            return stack, resource
        began_ns = self._now_ns()
        shares = self._get_shares(sample)
        is_over = _is_spent(shares, began_ns)
        if resource is None and is_over:
            resource = self._resources.find_newest(sample) or self._resources.get_shared(sample)
            self.coarse["resource"] += 1
        if resource is None:
            resource = self._resources.get(sample)
        if stack is None:
            self.coarse["stack"] += is_over
            stack = self._stacks.resolve(_without_user_frames(sample) if is_over else sample)
        _spend(shares, self._now_ns() - began_ns)
        return stack, resource

    def admit(self, sample: RawSample, resource: Resource) -> bool:
        """Charge a process for a new group of samples; False if it is above its budget.

        Also False if processes share the Resource, which has no place for threads of one of them,
        although the budget may suffice again by now.
        """
        if not self._is_limiting:
            return True
        shares = self._get_shares(sample)
        if resource.attributes.get(COARSE) is True or _is_spent(shares, self._now_ns()):
            self.coarse["group"] += 1
            return False
        _spend(shares, max(GROUP_NS, CONTEXT_BYTE_NS * len(sample.context)))
        return True

    def _get_shares(self, sample: RawSample) -> tuple[CpuShare, ...]:
        """The budgets of the process and of its group, if it has one."""
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


def _keep(shares: dict[KeyT, CpuShare], key: KeyT, share: CpuShare) -> CpuShare:
    shares[key] = share
    if len(shares) > MAX_PROCESSES:
        del shares[next(iter(shares))]
    return share


def _is_spent(shares: tuple[CpuShare, ...], now_ns: int) -> bool:
    return any(share.wait_ns(now_ns) for share in shares)


def _spend(shares: tuple[CpuShare, ...], cost_ns: int) -> None:
    for share in shares:
        share.spend(cost_ns)


def name_coarse_thread(resource: Resource) -> bytes:
    """Returns the name for threads of a process above its budget: that of its executable."""
    name = str(resource.attributes.get("process.executable.name", ""))
    return name.encode("utf-8", "surrogateescape")[:_MAX_COMM]


def _without_user_frames(sample: RawSample) -> RawSample:
    """A sample with its kernel stack alone, and why the other sides are empty."""
    sides = list(zip(sample.collected, sample.stacks, strict=True))
    return sample._replace(
        collected=tuple(
            [side if side[0] is KERNEL_SIDE else (side[0], STACK_OVER_BUDGET) for side, _ in sides]
        ),
        stacks=tuple([words if side[0] is KERNEL_SIDE else b"" for side, words in sides]),
    )
