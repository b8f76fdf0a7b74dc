"""Resolves kernel, native and Python frames separately, and joins them into stacks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

from otel_kprofiler.model import (
    SIDES,
    USER_SIDE,
    RawFrames,
    RawSample,
    RawSide,
    Side,
    SideKind,
    Stack,
    StackStatus,
    Unresolved,
    find_user_addresses,
)
from otel_kprofiler.speedups import find_stacks
from otel_kprofiler.symbols.cache import BoundedCache
from otel_kprofiler.symbols.kernel.snapshot import lookup_addresses
from otel_kprofiler.symbols.known_frames import KnownFrames

MAX_STACKS_CACHED: Final = 8_192
MAX_STACK_BYTES_CACHED: Final = 512 * 1024
"""Limit on the total size of cached raw stacks. Resolved stacks use three times as much memory."""
_WORD_BYTES: Final = 8

StateT = TypeVar("StateT", bound=Hashable)
Arrange = Callable[[Sequence[Side]], tuple[Side, ...]]
"""Function that arranges a stack's kernel, native and Python frames, from leaf to root."""
_SideKey = tuple[bytes, StackStatus, Any]  # raw frames, status, resolver state
_StackKey = tuple[Any, ...]  # collection outcomes, raw stacks, and the resolvers' states
_MakeStack = Callable[[tuple[Side, ...]], Stack]
_FindSide = Callable[[_SideKey], "Side | VariableSide"]
_STATES_AT: Final = 2  # index in a stack's key
_NO_STATE: Final = -1


class VariableSide(Protocol):
    """Frames that may resolve differently for samples with the same raw frames and state."""

    def of(self, sample: RawSample) -> Side:
        """Returns the frames for a sample; equal results are the same object."""


class SideResolver(Protocol[StateT]):
    """Resolves the kernel, native user, or Python frames in stacks.

    A lookup has two steps, so that results can be cached: :meth:`state` finds the process's state
    at the time of the sample, and :meth:`resolve` resolves the raw frames in that state. Lookups
    happen seconds after the sample, when the process may have changed its mappings, or its pid may
    have been reused.

    The thread that drains samples calls all methods. No method except :meth:`finish` may wait for
    files or the network. An incomplete result is provisional, and is looked up again when the
    window closes.
    """

    def state(self, sample: RawSample) -> StateT:
        """Returns the state of the sample's process at the time of the sample.

        States should be small, because caches keep them. For example, a state may pair a process
        with a counter that is incremented whenever the process's mappings change. If two states are
        equal, equal raw frames must resolve to equal results.
        """

    def resolve(self, raw: RawSide, state: StateT) -> Side | VariableSide:
        """Resolves raw frames, given a state from :meth:`state`. The result must be immutable."""

    def advance(self, now_boot_ns: int) -> int:
        """Applies information that has arrived since the last call.

        Returns the ``CLOCK_BOOTTIME`` up to which all changes have been applied. A sample is held
        until the returned boottime passes the sample's timestamp, but for at most half a second.
        """

    def finish(self, timeout_s: float) -> None:
        """Wait for pending reads. No new samples may arrive after this call.

        Provisional samples are resolved again after this call.
        """

    def close(self) -> None:
        """Release all resources; idempotent."""


class Stateless:
    """A resolver whose results depend on neither process nor time."""

    def state(self, sample: RawSample) -> None:
        """Returns None for every sample. :class:`StackResolver` does not call this method."""

    def advance(self, now_boot_ns: int) -> int:
        """Returns ``now_boot_ns``, because samples do not wait for names that are read later."""
        return now_boot_ns

    def finish(self, timeout_s: float) -> None:
        """Does nothing, because there are no pending reads."""

    def close(self) -> None:
        """Does nothing, because there are no resources."""


class RawAddresses(Stateless):
    """Leaves addresses unresolved, for frames without a resolver."""

    def __init__(self, kind: SideKind) -> None:
        self._reason = kind.usual_reason or Unresolved.NO_SYMBOL_TABLE

    def resolve(self, raw: RawSide, state: None) -> Side:
        """Returns the frames without names."""
        if raw.kind is USER_SIDE:
            addresses = find_user_addresses(raw.words)
        else:
            addresses = array("Q", lookup_addresses(raw.addresses()))
        return Side(raw.kind, RawFrames(raw.kind, addresses, self._reason), raw.status)


class StackResolver:
    """Resolves the stacks of samples, with separate resolvers for kernel, native and Python frames.

    Must not be used concurrently. Frames whose kind has no resolver remain unresolved. Closing
    this object closes the resolvers. ``arrange`` merges a stack's kernel, native and Python frames
    in call order.
    """

    def __init__(
        self, resolvers: Mapping[SideKind, SideResolver[Any]], arrange: Arrange | None = None
    ) -> None:
        self._make: _MakeStack = (lambda sides: Stack(arrange(sides))) if arrange else Stack
        raw = {kind: RawAddresses(kind) for kind in SIDES}
        self._resolvers: dict[SideKind, SideResolver[Any]] = {**raw, **resolvers}
        with_state = {
            kind: side_resolver
            for kind, side_resolver in resolvers.items()
            if not isinstance(side_resolver, Stateless)
        }
        self._states = tuple([each.state for each in with_state.values()])
        places = {kind: at for at, kind in enumerate(with_state, _STATES_AT)}
        self._sides: dict[SideKind, tuple[_FindSide, int]] = {}
        self._sources: dict[SideKind, tuple[Mapping[Any, object], int | None]] = {}
        for kind, side_resolver in self._resolvers.items():
            place = places.get(kind, _NO_STATE)
            find = _find_sides(kind, side_resolver)
            if kind is not USER_SIDE:  # few user stacks recur with other kernel frames
                cache = _cache_sides(find)
                self._sources[kind] = cache, place
                find = cache.__getitem__
            self._sides[kind] = find, place
        user = self._resolvers[USER_SIDE]
        self._known = user if isinstance(user, KnownFrames) else None
        if self._known:
            self._sources[USER_SIDE] = self._known.tables, None
        self._stacks: BoundedCache[_StackKey, Stack | _VariableStack] = BoundedCache(
            MAX_STACKS_CACHED,
            self._make_stack,
            weigh=_weigh,
            max_weight=MAX_STACK_BYTES_CACHED,
        )

    def find_all(self, samples: list[RawSample], *, makes: bool = True) -> list[Stack | None]:
        """Returns the stack of each sample, in much less time than :meth:`resolve`.

        Returns None for stacks with frames that are not cached, or that vary between samples.
        Without ``makes``, also returns None for stacks that have not been resolved before.
        """
        cache = self._stacks
        stacks: list[Stack | _VariableStack | None] = []
        if find_stacks:
            sources = self._sources if makes else {}
            raw_bytes = find_stacks(
                samples, self._states, cache, cache.old, sources, Side, self._make, stacks
            )
            if raw_bytes:
                cache.add_weight(raw_bytes)
                if self._known:
                    self._known.count_found(raw_bytes // _WORD_BYTES)
        else:
            stacks += [cache.find(self._key(sample)) for sample in samples]
        return [stack if type(stack) is Stack else None for stack in stacks]

    def resolve(self, sample: RawSample) -> Stack:
        """Resolves a sample's stack as of the time of the sample.

        Equal raw stacks resolve to the same object until the state of a resolver changes.
        """
        stack = self._stacks[self._key(sample)]
        return stack.of(sample) if isinstance(stack, _VariableStack) else stack

    def advance(self, now_boot_ns: int) -> int:
        """Advance all resolvers; return the ``CLOCK_BOOTTIME`` up to which they are complete."""
        return min(
            [side_resolver.advance(now_boot_ns) for side_resolver in self._resolvers.values()]
        )

    def finish(self, timeout_s: float) -> None:
        """Wait for the resolvers' pending reads, for at most ``timeout_s`` in total."""
        until = time.monotonic() + timeout_s
        for resolver in self._resolvers.values():
            resolver.finish(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Close the resolvers."""
        for resolver in self._resolvers.values():
            resolver.close()

    def _key(self, sample: RawSample) -> _StackKey:
        """Returns a key that is equal for samples whose stacks resolve to equal results."""
        return sample.collected, sample.stacks, *[state(sample) for state in self._states]

    def _make_stack(self, key: _StackKey) -> Stack | _VariableStack:
        sides: list[Side | VariableSide] = []
        is_variable = False
        for (kind, status), words in zip(key[0], key[1], strict=True):
            find, place = self._sides[kind]
            side = find((words, status, None if place == _NO_STATE else key[place]))
            sides.append(side)
            if type(side) is not Side:
                is_variable = True
        if is_variable:
            return _VariableStack(sides, self._make)
        return self._make(tuple(cast(list[Side], sides)))


def _weigh(key: _StackKey) -> int:
    return sum(map(len, key[1]))


def _find_sides(kind: SideKind, resolver: SideResolver[Any]) -> _FindSide:
    resolve, new = resolver.resolve, tuple.__new__

    def find(key: _SideKey) -> Side | VariableSide:
        # tuple.__new__ takes a third as long as RawSide(…).
        return resolve(new(RawSide, (kind, key[0], key[1])), key[2])

    return find


def _cache_sides(find: _FindSide) -> BoundedCache[_SideKey, Side | VariableSide]:
    return BoundedCache(
        MAX_STACKS_CACHED,
        find,
        weigh=lambda key: len(key[0]),
        max_weight=MAX_STACK_BYTES_CACHED // 2,
    )


class _VariableStack:
    __slots__ = ("_last", "_make", "_sides", "_stack")

    def __init__(self, sides: list[Side | VariableSide], make: _MakeStack) -> None:
        self._sides, self._make = sides, make
        self._last: tuple[Side, ...] = ()
        self._stack = Stack()

    def of(self, sample: RawSample) -> Stack:
        """Returns a sample's stack, reusing the last ``Stack`` if the frames are unchanged."""
        sides = tuple([
            side if isinstance(side, Side) else side.of(sample) for side in self._sides
        ])  # fmt: skip
        if list(map(id, sides)) != list(map(id, self._last)):
            self._last, self._stack = sides, self._make(sides)
        return self._stack
