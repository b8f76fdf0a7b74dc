"""Checks of the host."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of the host: what was looked at, what is there, what is needed, how to fix it."""

    check: str
    level: Level
    observed: str
    required: str = ""
    fix: str = ""
