"""Traces x86-64 machine code to locate the return address on the stack at each instruction.

A function begins and ends with its return address on top of the stack. At all other instructions,
the distance from the stack pointer to the return address is computed along the control flow:
forwards from function starts, and backwards from returns. The distance is unknown where code paths
disagree, and where an instruction cannot be decoded.

Runs in a child process, so it imports only :mod:`code_state` and :mod:`x86_code`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from otel_kprofiler.unwinding.code_state import (
    ENTRY,
    OUTERMOST,
    UNKNOWN,
    Inconsistent,
    State,
    is_known,
    merge,
    step,
    step_back,
)
from otel_kprofiler.unwinding.x86_code import INVALID, MAX_BYTES, Effect, Instruction, decode

_STOPS: Final = (Effect.JUMP, Effect.JUMP_INDIRECT, Effect.RETURN, Effect.END)
_CALLS: Final = (Effect.CALL, Effect.CALL_INDIRECT)
_JUMPS: Final = (Effect.JUMP, Effect.BRANCH)
_PADDING: Final = (b"\x90", b"\x0f\x1f", b"\xcc")
"""First bytes of nop instructions (of any length), and int3."""
_PADDING_PREFIXES: Final = b"\x2e\x66"
_ALIGNMENT: Final = 16  # compilers align functions to 16 bytes


class Function(NamedTuple):
    """The code that is reachable from the start of a function.

    Attributes:
        states: state before each instruction, by address; empty if the code is inconsistent.
        exits: starts of the functions to which the code jumps.
        returns: whether the code contains a return instruction, or jumps to an unknown address.
    """

    states: dict[int, State]
    exits: set[int]
    returns: bool
    calls: set[int]


class _Walk:
    def __init__(self, start: int, state: State) -> None:
        self.start = start
        self.states = {start: state}
        self.waiting = [start]
        self.exits: set[int] = set()
        self.calls: set[int] = set()
        self.ends: set[int] = set()
        self.leaves: set[int] = set()

    def enter(self, at: int, state: State) -> None:
        """Add a state before an instruction. Raises :class:`Inconsistent` on a contradiction."""
        earlier = self.states.get(at)
        merged = state if earlier is None else merge(earlier, state)
        if merged != earlier:
            self.states[at] = merged
            self.waiting.append(at)


def _check_end(state: State, length: int, effect: int) -> None:
    if not length:
        raise Inconsistent
    if effect == Effect.RETURN and state.sp is not None and (state.sp != ENTRY.sp or state.saved):
        raise Inconsistent


def _check_leave(state: State, effect: int) -> None:
    if effect in _JUMPS and state.sp is not None and (state.sp != ENTRY.sp or state.saved):
        raise Inconsistent


class Flow:
    """Follows the control flow of a file's code. All addresses are SVMAs.

    Args:
        texts: start and bytes of each executable segment.
        gaps: ranges of code that need unwind rules but have none.
        entry: the program's first instruction, whose caller is the kernel.
        endless_slots: GOT slots of imported functions that never return.
    """

    def __init__(
        self,
        texts: Sequence[tuple[int, bytes]],
        gaps: Sequence[tuple[int, int]],
        entry: int,
        endless_slots: frozenset[int],
    ) -> None:
        self._texts = [
            (start, start + len(code), code + bytes(2 * MAX_BYTES)) for start, code in texts
        ]
        self._gaps = gaps
        self._entry, self._endless_slots = entry, endless_slots
        self._instructions: dict[int, Instruction] = {}
        self._shared: dict[Instruction, Instruction] = {}
        self._steps: dict[tuple[State, int, int], State] = {}
        self._functions: dict[int, Function] = {}
        self._callers: defaultdict[int, set[int]] = defaultdict(set)
        self._endless: set[int] = set()
        self.states: dict[int, State] = {}

    def contains(self, address: int) -> bool:
        """Returns whether an address is in the code."""
        return any(start <= address < end for start, end, _ in self._texts)

    def instruction(self, at: int) -> Instruction:
        """Returns the instruction at an address; :data:`INVALID` if there is no instruction."""
        instruction = self._instructions.get(at)
        if instruction is None:
            instruction = INVALID
            for start, end, code in self._texts:
                if start <= at < end:
                    instruction = decode(code, at - start)
                    if at + instruction[0] > end:
                        instruction = INVALID
            instruction = self._shared.setdefault(instruction, instruction)
            self._instructions[at] = instruction
        return instruction

    def references(self) -> Iterator[int]:
        """Yields the addresses loaded by ``lea`` instructions in the reached code."""
        for at in self.states:
            length, effect, value = self.instruction(at)
            if effect == Effect.REFERENCE:
                yield at + length + value

    def absolutes(self) -> Iterator[int]:
        """Yields the constants in reachable code that may be addresses."""
        for at in self.states:
            _, effect, value = self.instruction(at)
            if effect == Effect.ABSOLUTE:
                yield value

    def add_functions(self, starts: Iterable[int]) -> None:
        """Add functions and, transitively, their callees."""
        self._add_all(starts)
        self._settle()
        self.states = self._join()

    def add_candidates(self, starts: Iterable[int]) -> None:
        """Follow code from possible function starts, dropping starts that contradict other code."""
        for start in starts:
            if self.contains(start) and start not in self.states and start not in self._functions:
                function = self._follow(start)
                if self._fits(function):
                    self._add_all(self._add(start, function))
        self._settle()
        self.states = self._join()

    def _add_all(self, starts: Iterable[int]) -> None:
        waiting = [at for at in starts if self.contains(at)]
        while waiting:
            start = waiting.pop()
            if start not in self._functions:
                waiting += filter(self.contains, self._add(start, self._follow(start)))

    def _add(self, start: int, function: Function) -> set[int]:
        self._functions[start] = function
        for callee in function.calls | function.exits:
            self._callers[callee].add(start)
        return function.calls

    def _fits(self, function: Function) -> bool:
        states = function.states
        returns = any(
            self.instruction(at)[1] == Effect.RETURN and state == ENTRY
            for at, state in states.items()
        )
        return returns and all(self.states.get(at, state) == state for at, state in states.items())

    def _settle(self) -> None:
        """Find further functions that never return, and follow their callers again."""
        waiting = list(self._functions)
        while waiting:
            start = waiting.pop()
            function = self._functions[start]
            if start in self._endless or function.returns or not function.states:
                continue
            if function.exits <= self._endless | {start}:
                self._endless.add(start)
                for caller in self._callers[start]:
                    if caller in self._functions and caller not in self._endless:
                        self._add(caller, self._follow(caller))
                        waiting.append(caller)
        for start, function in list(self._functions.items()):
            is_changed = any(at in self._functions and at != start for at in function.states)
            # the function falls through into another function that was added later
            if is_changed or not function.states:
                self._add(start, self._follow(start))

    def _join(self) -> dict[int, State]:
        states: dict[int, State] = {}
        disputed = set()
        for function in self._functions.values():
            for at, state in function.states.items():
                if states.setdefault(at, state) != state:
                    disputed.add(at)
        for at in disputed:
            states[at] = UNKNOWN
        return states

    def _follow(self, start: int) -> Function:
        walk = _Walk(start, OUTERMOST if start == self._entry else ENTRY)
        try:
            while walk.waiting:
                self._visit(walk, walk.waiting.pop())
        except Inconsistent:
            return Function({}, walk.exits, True, walk.calls)
        states, ends = walk.states, walk.ends | walk.leaves
        if ends:
            states = self._drop_dead_ends(states, ends, [start])
        return Function(states, walk.exits, bool(walk.ends), walk.calls)

    def _visit(self, walk: _Walk, at: int) -> None:
        length, effect, value = self.instruction(at)
        state = walk.states[at]
        _check_end(state, length, effect)
        if effect == Effect.RETURN:
            walk.ends.add(at)
        elif effect == Effect.JUMP_INDIRECT:
            if at + length + value not in self._endless_slots:
                walk.ends.add(at)
        elif effect == Effect.CALL:
            walk.calls.add(at + length + value)
        following = self._step(state, effect, value)
        for target in self._targets(at, length, effect, value):
            if target in self._functions and target != walk.start:
                _check_leave(following, effect)
                walk.exits.add(target)
                walk.leaves.add(at)
            elif not self.contains(target):
                walk.ends.add(at)
            else:
                walk.enter(target, following)

    def _drop_dead_ends(
        self, states: dict[int, State], ends: set[int], starts: list[int]
    ) -> dict[int, State]:
        """Returns ``states``, excluding code reached only through calls that might not return.

        Keeps code that can reach ``ends`` (such as returns), and code that is reachable from that
        code or from ``starts`` without passing a call that might not return.
        """
        sources: defaultdict[int, list[int]] = defaultdict(list)
        near: dict[int, list[int]] = {}
        for at in states:
            length, effect, value = self.instruction(at)
            targets = self._targets(at, length, effect, value)
            for target in targets:
                sources[target].append(at)
            is_certain = effect not in _CALLS or (
                effect == Effect.CALL and self._surely_returns(at + length + value)
            )
            near[at] = targets if is_certain else []
        good = set(_reach(ends, sources))
        good.update(starts)
        return {at: states[at] for at in _reach(good, near) if at in states}

    def _surely_returns(self, callee: int) -> bool:
        function = self._functions.get(callee)
        return function is not None and function.returns and bool(function.states)

    def _step(self, state: State, effect: int, value: int) -> State:
        if effect == Effect.NONE or effect >= Effect.CALL:
            return state
        key = state, effect, value
        after = self._steps.get(key)
        if after is None:
            after = self._steps.setdefault(key, step(state, effect, value))
        return after

    def _targets(self, at: int, length: int, effect: int, value: int) -> list[int]:
        behind = at + length
        if effect == Effect.NONE:
            return [behind]
        if effect in _CALLS:
            endless = self._endless if effect == Effect.CALL else self._endless_slots
            return [] if behind + value in endless or self._is_padding(behind) else [behind]
        targets = [] if effect in _STOPS else [behind]
        if effect in _JUMPS:
            targets.append(behind + value)
        return targets

    def add_rest(self) -> None:
        """Add unreached code, such as switch cases, by tracing backwards from returns."""
        rest = self._sweep()
        forward: dict[int, list[int]] = {}
        linked: defaultdict[int, list[int]] = defaultdict(list)
        for at, (length, effect, value) in rest.items():
            targets = self._targets(at, length, effect, value)
            behind = at + length
            if effect in _CALLS and behind % _ALIGNMENT == 0:
                # The callee may never return, so the call may end the function.
                targets = []
            forward[at] = targets
            for target in targets:
                if target in rest and target not in self._functions:
                    linked[at].append(target)
                    linked[target].append(at)
        seen: set[int] = set()
        for at in rest:
            if at not in seen:
                self._solve(_connected(at, linked, seen), rest, forward)

    def _is_padding(self, at: int) -> bool:
        for start, end, code in self._texts:
            if start <= at < end:
                instruction = code[at - start : at - start + MAX_BYTES]
                return instruction.lstrip(_PADDING_PREFIXES).startswith(_PADDING)
        return False

    def _sweep(self) -> dict[int, Instruction]:
        """Decodes the instructions in gaps, except those with known states."""
        rest = {}
        for start, end in self._gaps:
            at = start
            while at < end:
                length, effect, value = self.instruction(at)
                if at not in self.states and length:
                    rest[at] = length, effect, value
                at += max(length, 1)
        return rest

    def _solve(
        self, part: list[int], rest: dict[int, Instruction], forward: dict[int, list[int]]
    ) -> None:
        """Find the states in connected code, and store them if they are consistent."""
        members = set(part)
        sources: defaultdict[int, list[int]] = defaultdict(list)
        states: dict[int, State] = {}
        for at in part:
            for target in forward[at]:
                if target in members:
                    sources[target].append(at)
            for state in self._grounds(forward[at], members, *rest[at][1:]):
                if is_known(state) and states.setdefault(at, state) != state:
                    return
        waiting = list(states)
        grounds = set(waiting)
        try:
            while waiting:
                at = waiting.pop()
                following = step(states[at], *rest[at][1:])
                near = [(target, following) for target in forward[at] if target in members]
                near += [(other, step_back(states[at], *rest[other][1:])) for other in sources[at]]
                for place, other in near:
                    if place in self._functions or not is_known(other):
                        continue
                    if place not in states:
                        states[place] = other
                        waiting.append(place)
                    else:
                        merge(states[place], other)
        except Inconsistent:
            return
        self.states.update(self._drop_dead_ends(states, grounds, []))

    def _grounds(
        self, targets: list[int], members: set[int], effect: int, value: int
    ) -> Iterator[State]:
        """Yields the possible states before an instruction, derived from its known successors."""
        if effect == Effect.RETURN:
            yield ENTRY
        for target in targets:
            if target in self._functions:
                if effect == Effect.JUMP:
                    yield ENTRY
            elif target not in members and target in self.states:
                yield step_back(self.states[target], effect, value)


def _reach(starts: Iterable[int], links: Mapping[int, list[int]]) -> dict[int, None]:
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    while waiting:
        for other in links.get(waiting.pop(), ()):
            if other not in seen:
                seen[other] = None
                waiting.append(other)
    return seen


def _connected(at: int, linked: Mapping[int, list[int]], seen: set[int]) -> list[int]:
    """Returns the instructions connected to the instruction at ``at``; adds them to ``seen``."""
    part = list(_reach([at], linked))
    seen.update(part)
    return part
