"""Combines a kernel resolver and a user resolver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from otel_kprofiler.model import Unresolved
from otel_kprofiler.symbols.resolution import (
    FIRST_KERNEL_ADDRESS,
    Resolution,
    Resolver,
    make_unknown,
)
from otel_kprofiler.symbols.resolvers.kernel import KernelResolver
from otel_kprofiler.symbols.resolvers.process import ProcessesResolver
from otel_kprofiler.symbols.user.sources import SymbolSources


class Symbolizer:
    """Resolves kernel addresses with one resolver and user addresses with another.

    Implements :class:`Resolver`; thread-safe if both resolvers are thread-safe. Must be closed, or
    used as a context manager.

    Example:
        >>> import os
        >>> with Symbolizer.default() as symbolizer:
        ...     malloc = symbolizer.find("malloc", pid=os.getpid())[0]
        ...     (found,) = symbolizer.resolve([malloc.address], pid=os.getpid())
        >>> found.function
        'malloc'
    """

    def __init__(self, *, kernel: Resolver | None = None, user: Resolver | None = None) -> None:
        self._kernel = kernel
        self._user = user

    @classmethod
    def default(cls, symbols: SymbolSources | None = None) -> Symbolizer:
        """Returns a symbolizer for the kernel and all processes on this host.

        Kernel symbols are as of the first kernel query. ``symbols`` provides the names of user
        functions. By default, names are read from the mapped files and from installed debug files.
        """
        return cls(kernel=KernelResolver(), user=ProcessesResolver(symbols=symbols))

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves kernel and user addresses, which may be mixed as in a stack.

        Addresses must be instruction addresses, not return addresses; see :func:`lookup_addresses`.
        User addresses belong to process ``pid``.
        """
        answers: dict[int, Resolution] = {}
        for resolver, in_kernel in ((self._kernel, True), (self._user, False)):
            places = [
                place
                for place, address in enumerate(addresses)
                if (address >= FIRST_KERNEL_ADDRESS) is in_kernel
            ]
            asked = [addresses[place] for place in places]
            if resolver is None:
                resolutions = [make_unknown(address, Unresolved.UNMAPPED) for address in asked]
            else:
                resolutions = resolver.resolve(asked, pid) if asked else []
            answers.update(zip(places, resolutions, strict=True))
        return [answers[place] for place in range(len(addresses))]

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds all functions with this name in a process, or in the kernel if ``pid`` is None."""
        resolver = self._kernel if pid is None else self._user
        return resolver.find(name, pid) if resolver else []

    def close(self) -> None:
        """Close both resolvers."""
        for resolver in (self._kernel, self._user):
            if resolver is not None:
                resolver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
