"""Defines the reasons why an interpreter's frames are not read."""

import enum

from otel_kprofiler.errors import KProfilerError


class Refusal(enum.Enum):
    """The reason for a refusal; the value is shown to users."""

    UNKNOWN_VERSION = "a CPython version other than 3.11 to 3.15"
    FREE_THREADED = "a free-threaded build of CPython"
    DEBUG_BUILD = "a debug build of CPython"
    OTHER_LAYOUT = "a build of CPython whose objects are not laid out as expected"
    NO_SYMBOLS = "a build of CPython without the required symbols"
    NOT_PROVED = "the frames read from this process's memory differ from those that Python reports"
    NOT_OPENED = "a file that this process may not open, or that no longer exists"
    DAMAGED = "an ELF file that is malformed or cannot be read"


class InterpreterRefused(KProfilerError):  # noqa: N818 - an outcome, which is counted
    """Raised if it is unsafe to read an interpreter's frames. ``detail`` extends the message."""

    def __init__(self, refusal: Refusal, detail: str = "") -> None:
        super().__init__(f"{refusal.value} ({detail})" if detail else refusal.value)
        self.refusal = refusal
        self.detail = detail
