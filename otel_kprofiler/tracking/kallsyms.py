"""Reads ``/proc/kallsyms`` with addresses, even if the kernel hides them from this process.

The ``ksym`` iterator (kernel 6.0, Documentation/bpf/bpf_iterators.rst) passes every symbol with its
address to a BPF program. The iterator needs CAP_BPF, CAP_PERFMON and BTF, and ignores
``kernel.kptr_restrict``.
"""

import logging
from typing import Final

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.errors import KProfilerError, describe_error
from otel_kprofiler.host import (
    HostFiles,
    SymbolsVisibility,
    open_in_memory,
    read_capabilities,
    read_symbols_visibility,
)
from otel_kprofiler.model import Finding, Level
from otel_kprofiler.text import describe_count
from otel_kprofiler.tracking.program_iterator import read_iterator

PROC_KALLSYMS: Final = "/proc/kallsyms"

_NEEDED: Final = ("CAP_BPF", "CAP_PERFMON")
_PROGRAM: Final = "list_symbols"
_OWN: Final = b"_list_symbols\t[bpf]"
_log = logging.getLogger(__name__)


class IteratedKallsyms:
    """Opens this host's files. Kallsyms is read through the iterator if addresses are hidden.

    The first read of kallsyms decides whether to use the iterator. ``refused`` explains why the
    iterator cannot be used; empty if it is usable or not needed.
    """

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._visibility: SymbolsVisibility | None = None
        self.is_used = False
        self.refused = ""
        self.list_dir, self.read_link = files.list_dir, files.read_link

    def open_fd(self, path: str) -> int:
        """Open a file for reading; the caller closes the descriptor."""
        text = self._read(path)
        return self._files.open_fd(path) if text is None else open_in_memory("kallsyms", text)

    def read_bytes(self, path: str) -> bytes:
        """Returns the whole content of a file."""
        text = self._read(path)
        return self._files.read_bytes(path) if text is None else text

    def _read(self, path: str) -> bytes | None:
        """Returns the iterator's output; None if the file itself should be read."""
        if path != PROC_KALLSYMS:
            return None
        if self._visibility is None:
            self._visibility = read_symbols_visibility(self._files)
        if self.refused or self._visibility is SymbolsVisibility.VISIBLE:
            return None
        try:
            text = read_kallsyms()
        except (OSError, KProfilerError) as error:
            self.refused = describe_error(error)
            _log.info("the ksym iterator cannot read hidden symbols: %s", describe_error(error))
            return None
        self.is_used = True
        return text


def read_kallsyms() -> bytes:
    """Read all kernel symbols and their addresses with the BPF iterator, in kallsyms format.

    Raises ``OSError``, or ``KProfilerError`` if libbpf is missing or the program is rejected.
    """
    return clean_symbols(read_iterator(LibbpfLoader(), _PROGRAM))


def clean_symbols(text: bytes) -> bytes:
    """Remove the iterator program's own symbol and the repeated last line.

    At the end, the kernel calls the program again for the last symbol, possibly with another name
    in brackets (kernel/kallsyms.c, ``bpf_iter_ksym_seq_stop``).
    """
    lines = text.splitlines(keepends=True)
    if len(lines) > 1 and lines[-1].split()[:3] == lines[-2].split()[:3]:
        del lines[-1]
    return b"".join(line for line in lines if not line.rstrip().endswith(_OWN))


def find_hidden_symbols(files: HostFiles) -> Finding | None:
    """Returns the ``doctor`` finding about the iterator; None if the iterator is not needed."""
    kallsyms = IteratedKallsyms(files)
    if read_symbols_visibility(files) is SymbolsVisibility.VISIBLE:
        return None
    check, required = "hidden kernel symbols", "the BPF iterator ksym gives their addresses"
    count = kallsyms.read_bytes(PROC_KALLSYMS).count(b"\n")
    if kallsyms.is_used:
        return Finding(
            check, Level.OK, f"{describe_count(count, 'symbol')} read with the iterator", required
        )
    missing = read_capabilities(files).missing(_NEEDED)
    why = f"{' and '.join(missing)} missing" if missing else kallsyms.refused
    fix = f"provide {' and '.join(_NEEDED)}, libbpf, and kernel 6.0 or newer with BTF"
    return Finding(check, Level.INFO, why, required, fix)
