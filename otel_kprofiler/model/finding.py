"""Results of host checks."""

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a host check: subject, observed state, required state and fix."""

    check: str
    level: Level
    observed: str
    required: str = ""
    fix: str = ""
