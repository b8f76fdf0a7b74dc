"""Reads the symbols of kernel code outside modules, with the best method available."""

import enum
import logging
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.errors import KProfilerError, describe_error
from otel_kprofiler.host import HostFiles, get_capability_fix, read_capabilities
from otel_kprofiler.model import Finding, Ksymbol, KsymbolAction, Level, ModuleKind
from otel_kprofiler.text import describe_count
from otel_kprofiler.tracking.ksymbol_records import PROGRAM_PREFIX
from otel_kprofiler.tracking.program_iterator import read_programs
from otel_kprofiler.tracking.programs import ProgramReader

_KALLSYMS: Final = "/proc/kallsyms"
_READ_BYTES: Final = 64 * 1024
_LINE: Final = re.compile(
    rb"^([0-9a-f]{16}) . (\S+)\t\[(bpf|__builtin__ftrace|__builtin__kprobes)\]$", re.MULTILINE
)

_log = logging.getLogger(__name__)


class ReadMethod(enum.Enum):
    """A method of reading the loaded BPF programs. The value is shown to users."""

    WALK = "read with bpf(2)"
    ITERATOR = "read with the iterator bpf_prog"
    KALLSYMS = "read from /proc/kallsyms, which has no lengths"


class Reading(NamedTuple):
    """Symbols that were read: all symbols, or only those of BPF programs."""

    action: KsymbolAction
    symbols: tuple[Ksymbol, ...]


class BaselineReader:
    """Reads loaded symbols by the best method available to this process; not thread-safe.

    ``refused`` contains one sentence per better method, with the reason why it is not used.
    """

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._programs = ProgramReader()
        self.method = ReadMethod.WALK
        self.refused: list[str] = []
        self.kallsyms_reads = 0

    def read_programs(self) -> Reading | None:
        """Returns all BPF functions; None if the kernel permits only reading kallsyms."""
        ways: tuple[tuple[ReadMethod, Callable[[], list[Ksymbol]]], ...] = (
            (ReadMethod.WALK, self._programs.read),
            (ReadMethod.ITERATOR, lambda: read_programs(LibbpfLoader())),
        )
        for method, read in ways:
            if method is not self.method:
                continue
            try:
                return Reading(KsymbolAction.PROGRAMS_READ, tuple(read()))
            except (OSError, KProfilerError, ValueError) as error:
                self.refused.append(f"{method.name.lower()}: {describe_error(error)}")
                _log.info("BPF programs cannot be %s: %s", method.value, describe_error(error))
                self.method = (
                    ReadMethod.ITERATOR if method is ReadMethod.WALK else ReadMethod.KALLSYMS
                )
        return None

    def read_all(self, keep_on: Callable[[], bool]) -> Reading | None:
        """Reads all symbols outside modules; None if addresses are hidden or reading was stopped.

        Reading may take seconds, and stops when ``keep_on`` returns False.
        """
        programs = self.read_programs()
        try:
            lines = self._find_lines(keep_on)
        except OSError as error:
            _log.warning("BPF trampolines cannot be read: %s", describe_error(error))
            return programs
        if lines is None:
            return programs
        if programs is None:
            return Reading(KsymbolAction.ALL_READ, tuple(lines))
        others = [line for line in lines if not line.name.startswith(PROGRAM_PREFIX)]
        return Reading(KsymbolAction.ALL_READ, (*programs.symbols, *others))

    def _find_lines(self, keep_on: Callable[[], bool]) -> list[Ksymbol] | None:
        self.kallsyms_reads += 1
        symbols: list[Ksymbol] = []
        rest = b""
        with open(self._files.open_fd(_KALLSYMS), "rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                text, _, rest = (rest + piece).rpartition(b"\n")
                last = text[text.rfind(b"\n") + 1 :]
                if not keep_on() or not last[:16].strip(b"0"):
                    return None
                symbols += parse_ksymbol_lines(text)
        return symbols + parse_ksymbol_lines(rest)


def parse_ksymbol_lines(text: bytes) -> list[Ksymbol]:
    """Parses symbols outside modules in complete kallsyms lines; skips hidden symbols."""
    return [
        Ksymbol(
            int(address, 16), 0, name.decode("utf-8", "backslashreplace"),
            ModuleKind.BPF if block == b"bpf" else ModuleKind.OUT_OF_LINE,
        )
        for address, name, block in _LINE.findall(text)
        if address.strip(b"0")
    ]  # fmt: skip


def find_ksymbol_method(files: HostFiles) -> Finding:
    """Returns the ``doctor`` finding about BPF program symbols."""
    check, required = "BPF symbols", "names and lengths of BPF programs, read with bpf(2)"
    reader = BaselineReader(files)
    reading = reader.read_programs()
    count = len(reading.symbols) if reading else 0
    counted = f"{describe_count(count, 'function')} " if reading else ""
    observed = counted + reader.method.value
    if reader.method is ReadMethod.WALK:
        return Finding(check, Level.OK, observed, required)
    if reader.method is ReadMethod.ITERATOR:
        observed += "; source lines and types of programs are not available"
    # ``WALK`` needs root; these capabilities suffice for ``ITERATOR``.
    capabilities = read_capabilities(files)
    missing = capabilities.missing(["CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"])
    fix = get_capability_fix(missing, capabilities) if missing else ""
    if not missing and reader.method is ReadMethod.KALLSYMS:
        fix = "; ".join(reader.refused)
    return Finding(check, Level.INFO, observed, required, fix)
