"""Defines the reasons why source lines for a file cannot be read."""

import enum

from otel_kprofiler.errors import KProfilerError


class LinesProblem(enum.Enum):
    """The reason why lines cannot be read. Each value is the key of a counter in ``/status``."""

    DAMAGED = "damaged"  # also for unreadable DWARF and for unknown errors
    TOO_LARGE = "too_large"
    MEMORY = "memory"
    CPU_TIME = "cpu_time"
    TIME = "time"
    NOT_KEPT = "not_kept"
    NO_PROCESS = "no_process"
    UNANSWERED = "unanswered"  # the file system does not respond


class LinesError(KProfilerError):
    """Raised if the source lines for a file cannot be read.

    ``problem`` is also counted in ``/status``. If ``may_pass`` is set, a retry may succeed.
    """

    def __init__(
        self,
        message: str,
        problem: LinesProblem = LinesProblem.DAMAGED,
        *,
        may_pass: bool = False,
    ) -> None:
        super().__init__(message)
        self.problem = problem
        self.may_pass = may_pass
