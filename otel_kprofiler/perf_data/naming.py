"""Defines the interface for symbolizing addresses in a recording."""

from typing import Protocol

from otel_kprofiler.model import Frame, Module


class Names(Protocol):
    """Finds names for code addresses."""

    def find_user(self, path: str, build_id: str, offset: int) -> Frame | None:
        """Returns the frame at a file offset; None if no file on this host has the build id.

        ``path`` is the file's path on the recorded host, as the argument of ``os.fsencode``.
        """

    def find_kernel(self, module: Module, rva: int, address: int) -> Frame | None:
        """Returns the frame at a kernel address; None if this host lacks the symbols.

        ``module`` is the kernel or a kernel module, with its base address on the recorded host.
        ``rva`` is relative to the base. ``address`` is the runtime address on the recorded host.
        """
