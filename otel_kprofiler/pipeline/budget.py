"""Limits what one process may cost the thread that all samples go through."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

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
"""Part of the thread's time that one process may take in the long run, after a second in one go."""
GROUP_NS: Final = 50_000
"""Later cost of a group of equal samples: closing and encoding its window."""
MAX_PROCESSES: Final = 4096
"""Processes whose cost is remembered; others start anew."""
COARSE_LABELS: Final[LabelSet] = ((COARSE, "true"),)
_MAX_COMM: Final = 15


class ProcessBudgets:
    """Resolves samples, and charges each process for what is new in them.

    What is new costs the most: a program to identify, a stack to resolve, a group of samples that
    differs from all others of the window. A process that changes its thread names, stacks, code or
    programs all the time can make each sample new. It pays with the time that this takes, measured
    in wall-clock time, so that the budget is smaller in effect where CPU time is scarce. Above its
    budget, its own samples are coarser, and those of others wait for none of it.

    Belongs to one thread, except :attr:`coarse`.

    Args:
        stacks: resolves stacks.
        resources: finds the Resource of a process.
        is_limiting: whether processes have budgets.
        now_ns: any steady clock, in nanoseconds.

    Attributes:
        coarse: number of samples so far by what is coarse: ``resource`` (it is that of the program
            that the process ran before), ``stack`` (user sides have no frames, with the status
            ``over_budget``), ``group`` (the thread is called like the executable, and has the
            number of the process; without span and labels).
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
        self._shares: dict[int, CpuShare] = {}  # by process id, the longest known first
        self.coarse: Counter[str] = Counter({"resource": 0, "stack": 0, "group": 0})

    def resolve(self, sample: RawSample) -> tuple[Stack, Resource]:
        """The stack and the Resource of a sample."""
        if not self._is_limiting:
            return self._stacks.resolve(sample), self._resources.get(sample)
        stack, resource = self._stacks.find(sample), self._resources.find(sample)
        if stack is not None and resource is not None:
            return stack, resource
        began_ns = self._now_ns()
        share = self._get_share(sample.tgid)
        is_over = share.wait_ns(began_ns) > 0
        if resource is None and is_over:
            resource = self._resources.find_newest(sample)
            self.coarse["resource"] += resource is not None
        if resource is None:
            resource = self._resources.get(sample)
        if stack is None:
            self.coarse["stack"] += is_over
            stack = self._stacks.resolve(_without_user_frames(sample) if is_over else sample)
        share.spend(self._now_ns() - began_ns)
        return stack, resource

    def admit(self, tgid: int) -> bool:
        """Charge a process for a new group; False if it is above its budget."""
        if not self._is_limiting:
            return True
        share = self._get_share(tgid)
        if share.wait_ns(self._now_ns()):
            self.coarse["group"] += 1
            return False
        share.spend(GROUP_NS)
        return True

    def _get_share(self, tgid: int) -> CpuShare:
        share = self._shares.get(tgid)
        if share is None:
            share = self._shares[tgid] = CpuShare(SHARE)
            if len(self._shares) > MAX_PROCESSES:
                del self._shares[next(iter(self._shares))]
        return share


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
