"""Resolvers that wrap other resolvers: a chain, a cache and a process filter."""

import threading
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Final

from otel_kprofiler.model import ProcessKey, Unresolved
from otel_kprofiler.symbols.resolution import Resolution, Resolver, make_unknown

DEFAULT_CACHE_ENTRIES: Final = 32_768


class ChainResolver:
    """Queries resolvers one after the other, each for the addresses that are still unnamed.

    If no resolver has a name, uses the most complete result: one with function bounds, else one
    with a module. Closing the chain closes the resolvers.
    """

    def __init__(self, *resolvers: Resolver) -> None:
        self._resolvers = resolvers

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves each address with the first resolver that has a name for it."""
        answers = [make_unknown(address, Unresolved.UNMAPPED) for address in addresses]
        open_ones = list(range(len(addresses)))
        first = True
        for resolver in self._resolvers:
            resolutions = resolver.resolve([addresses[index] for index in open_ones], pid)
            for index, answer in zip(open_ones, resolutions, strict=True):
                if first or _rank(answer) > _rank(answers[index]):
                    answers[index] = answer
            open_ones = [index for index in open_ones if not answers[index].lines]
            first = False
            if not open_ones:
                break
        return answers

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Returns the functions found by all resolvers, in resolver order."""
        matches: dict[tuple[ProcessKey | None, str, int], Resolution] = {}
        for resolver in self._resolvers:
            for answer in resolver.find(name, pid):
                matches.setdefault((answer.process, answer.path, answer.address), answer)
        return list(matches.values())

    def close(self) -> None:
        """Close the resolvers."""
        for resolver in self._resolvers:
            resolver.close()


def _rank(answer: Resolution) -> tuple[bool, bool, bool]:
    frame = answer.frame
    return bool(frame.lines), frame.unresolved is Unresolved.NO_NAME, frame.module is not None


class CachedResolver:
    """Caches a resolver's results. Closing this object also closes the resolver.

    Args:
        state: maps a pid to the state of that process, and None to the state of addresses that do
            not belong to a process. Results expire when the state changes; see
            :meth:`Processes.state`. By default, results never expire, which is correct for files.
        entries: maximum number of cached results, each of about 500 bytes. The oldest results
            are evicted first.
    """

    def __init__(
        self,
        resolver: Resolver,
        *,
        state: Callable[[int | None], Hashable] | None = None,
        entries: int = DEFAULT_CACHE_ENTRIES,
    ) -> None:
        self._resolver = resolver
        self._state = state
        self._entries = entries
        self._lock = threading.Lock()
        self._known: dict[tuple[Hashable, int | None, int], Resolution] = {}

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Returns cached results, and resolves addresses that are not in the cache."""
        state = self._state(pid) if self._state else None
        cache = self._known
        answers = [cache.get((state, pid, address)) for address in addresses]
        missing = [index for index, answer in enumerate(answers) if answer is None]
        if missing:
            resolutions = self._resolver.resolve([addresses[index] for index in missing], pid)
            with self._lock:
                for index, answer in zip(missing, resolutions, strict=True):
                    answers[index] = cache[state, pid, addresses[index]] = answer
                while len(cache) > self._entries:
                    del cache[next(iter(cache))]
        return [answer for answer in answers if answer is not None]

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Looks up a name with the resolver, without caching the result."""
        return self._resolver.find(name, pid)

    def close(self) -> None:
        """Drop all cached results, and close the resolver."""
        with self._lock:
            self._known.clear()
        self._resolver.close()


class PidFilter:
    """Resolves only addresses in the kernel and in selected processes.

    The set of pids may change at any time. Closing this object also closes the resolver.
    """

    def __init__(self, resolver: Resolver, pids: Container[int]) -> None:
        self._resolver = resolver
        self._pids = pids

    def resolve(self, addresses: Sequence[int], pid: int | None = None) -> list[Resolution]:
        """Resolves addresses, or reports that the process is excluded."""
        if pid is None or pid in self._pids:
            return self._resolver.resolve(addresses, pid)
        return [make_unknown(address, Unresolved.LEFT_OUT) for address in addresses]

    def find(self, name: str, pid: int | None = None) -> list[Resolution]:
        """Finds functions by name, except in excluded processes."""
        return self._resolver.find(name, pid) if pid is None or pid in self._pids else []

    def close(self) -> None:
        """Close the resolver."""
        self._resolver.close()
