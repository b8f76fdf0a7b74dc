"""Symbolizes the code in a recording by build id, using this host's files and kernel."""

from os.path import basename

from otel_kprofiler.model import KERNEL_SIDE, BuildId, FileId, Frame, Module
from otel_kprofiler.symbols import (
    VMLINUX,
    FileIdentity,
    InstalledFiles,
    InstalledKernel,
    KernelSymbolizer,
    SymbolSources,
)


class CodeNames:
    """Symbolizes code in this host's user-space binaries and kernels. Not thread-safe.

    Without a ``symbolizer``, the running kernel's symbols are read on first use.
    """

    def __init__(self, symbolizer: KernelSymbolizer | None = None) -> None:
        self._files = InstalledFiles(SymbolSources())
        self._symbolizer = symbolizer
        self._installed: InstalledKernel | None = None

    def find_user(self, path: str, build_id: str, offset: int) -> Frame | None:
        """See :class:`Names`."""
        if not build_id:
            return None
        absolute = path if path.startswith("/") else ""
        identity = FileIdentity(basename(path), BuildId(build_id), FileId(""), absolute)
        return self._files.frame(identity, offset, offset)

    def find_kernel(self, module: Module, rva: int, address: int) -> Frame | None:
        """See :class:`Names`."""
        if self._symbolizer is None:
            self._symbolizer = KernelSymbolizer.live()
        loaded = self._symbolizer.module(module.name)
        if loaded is not None and loaded.build_id == module.build_id is not None:
            # Module RVAs cannot be used, because perf's base for a module differs from loaded.base.
            runtime = loaded.base + rva if module.name == VMLINUX else address
            (frame,) = self._symbolizer.resolve_addresses([runtime])
            if frame.module is loaded:
                return frame
        if self._installed is None:
            self._installed = InstalledKernel(symbolizer=self._symbolizer)
        if module.name != VMLINUX or module.build_id is None:
            return None
        lines = self._installed.lines(module.name, module.build_id, rva)
        return Frame(module, rva, lines, 0, KERNEL_SIDE) if lines else None
