"""Defines the errors raised while reading an ELF file."""

import enum

from otel_kprofiler.errors import KProfilerError


class ElfProblem(enum.Enum):
    """The reason why an ELF file cannot be read; the value is shown to users."""

    UNREADABLE = "the file could not be read"
    CHANGED = "the file changed while it was being read"
    NOT_ELF = "not an ELF file for 64-bit code of this machine"
    DAMAGED_HEADERS = "the ELF headers are malformed"
    OUT_OF_BOUNDS = "a header points outside the file"
    DAMAGED_SECTION = "a section is malformed or cannot be decompressed"
    NO_SECTION = "a section is missing or has an unsupported format"
    TOO_LARGE = "the file exceeds a size limit"
    NOT_IN_FILE = "a section is compressed or has no content in the file"


class ElfError(KProfilerError):
    """Raised if an ELF file is malformed, unsupported or unreadable; ``detail`` is for logs."""

    def __init__(self, problem: ElfProblem, detail: str = "") -> None:
        super().__init__(f"{problem.value} ({detail})" if detail else problem.value)
        self.problem = problem
        self.detail = detail
