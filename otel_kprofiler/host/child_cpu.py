"""Limits the CPU time of child processes by the size of their input."""

from __future__ import annotations

import math
import resource
import signal
from contextlib import suppress
from typing import Final, NamedTuple

_MIB: Final = 1 << 20


class CpuGrant(NamedTuple):
    """CPU time that a child process may take.

    Attributes:
        seconds: limit, at least 1.
        input_bytes: size of the input that the limit was computed from.
    """

    seconds: int
    input_bytes: int

    def describe(self) -> str:
        """Describe that a child took more."""
        size = -(-self.input_bytes // _MIB)
        return f"took more than {self.seconds} s of CPU for {size} MiB"


class CpuRate(NamedTuple):
    """CPU time that input of any size may take.

    Attributes:
        least_s: seconds for empty input.
        per_mib_s: more seconds for each MiB of input.
        most_s: limit for input of any size, since a file may lie about its size.
    """

    least_s: float
    per_mib_s: float
    most_s: int

    def grant(self, input_bytes: int) -> CpuGrant:
        """Grant CPU time for input of this size."""
        seconds = min(self.most_s, self.least_s + self.per_mib_s * input_bytes / _MIB)
        return CpuGrant(max(1, math.ceil(seconds)), input_bytes)


def limit_cpu(pid: int, grant: CpuGrant) -> None:
    """Limit a child to its grant; SIGXCPU then ends it, without a core file.

    Args:
        pid: a child just started, as the same user.
        grant: its CPU time.
    """
    limits = {resource.RLIMIT_CPU: grant.seconds, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        with suppress(OSError):  # it has ended
            _, hard = resource.prlimit(pid, kind)
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(pid, kind, (soft, hard))


def has_exceeded_cpu(status: int) -> bool:
    """Returns whether a child with this return code ended at its limit on CPU time."""
    return status == -signal.SIGXCPU
