"""Resolves RVAs in a kernel that a profile identifies only by build id."""

from collections.abc import Iterable

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import BuildId, Line
from otel_kprofiler.symbols.kernel.elf_functions import ElfSymbols
from otel_kprofiler.symbols.kernel.elf_image import find_debug_file, open_elf
from otel_kprofiler.symbols.kernel.symbolizer import KernelSymbolizer


class InstalledKernel:
    """Names the code of a kernel that is running or installed on this host. Not thread-safe.

    Args:
        paths: vmlinux, modules or their debug files; other files are ignored.
        symbolizer: symbols of the running kernel; by default, they are read on first use.
    """

    def __init__(
        self, paths: Iterable[str] = (), symbolizer: KernelSymbolizer | None = None
    ) -> None:
        self._paths = tuple(paths)
        self._symbolizer = symbolizer
        self._files: dict[BuildId, ElfSymbols | None] = {}

    def lines(self, module: str, build_id: BuildId, rva: int) -> tuple[Line, ...]:
        """Returns the function at an RVA; empty if unknown, or if ``build_id`` is empty.

        ``module`` is ``vmlinux`` or a module's name.
        """
        if not build_id:
            return ()
        if self._symbolizer is None:
            self._symbolizer = KernelSymbolizer.live()
        loaded = self._symbolizer.module(module)
        if loaded is not None and loaded.build_id == build_id:
            (frame,) = self._symbolizer.resolve_addresses([loaded.base + rva])
            if frame.lines and frame.module is loaded:
                return frame.lines
        if build_id not in self._files:
            self._files[build_id] = self._open(build_id)
        symbols = self._files[build_id]
        match = symbols.find(rva) if symbols else None
        return (match.line,) if match else ()

    def _open(self, build_id: BuildId) -> ElfSymbols | None:
        installed = find_debug_file(build_id)
        for path in (*self._paths, *([installed] if installed else [])):
            try:
                if open_elf(path).build_id == build_id:
                    return ElfSymbols(path)
            except (OSError, KProfilerError):  # unreadable, or not a kernel image
                continue
        return None
