"""Checks that each caller in a program's stacks calls its callee.

The check is used for code without unwind tables, which an independent unwinder would require.
objdump provides the addresses and targets of calls. Functions are located by the symbols of the
unstripped program and by call targets.
"""

from __future__ import annotations

import bisect
import itertools
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_kprofiler.model import FrameSource, StackEnd, UserStack
from tests.truth import dumps
from tests.truth.reference import Maps

_LINE = re.compile(
    r"^\s*([0-9a-f]+):\t(?:(?:notrack|bnd|repz|data16|addr32) )*(\w+)\s*((?:([0-9a-f]+) <)?.*)"
)
_OUTERMOST = {"_start", "__clone", "clone", "__clone3", "clone3"}
_EXIT_LENGTH = 5  # number of instructions that end a thread with exit(2)
_ANY = 0  # the target of an indirect jump
_HZ = 997
_LOADING_S = 200
"""The time limit for loading tables; deriving rules from code is slow on a busy machine."""
_SIGRETURN = "$0xf,"  # immediate operand: the system call number of rt_sigreturn


def take_stacks(built: Path, command: Sequence[str], count: int) -> list[UserStack]:
    """Takes at least ``count`` stacks after tables are loaded; ``built`` is the BPF program."""
    stacks: list[UserStack] = []
    with (
        dumps.Dumps(built) as dumper,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            end = time.monotonic() + _LOADING_S
            while time.monotonic() < end:
                taken = dumper.take(process.pid, _HZ, 40, timeout_s=1)
                if taken and all(dump.stack.end is not StackEnd.PENDING for dump in taken):
                    break
            while len(stacks) < count and process.poll() is None:
                wanted = min(200, count - len(stacks))
                stacks += [dump.stack for dump in dumper.take(process.pid, _HZ, wanted)]
        finally:
            process.kill()
    return stacks


def find_libraries(command: Sequence[str], program: Path) -> dict[Path, int]:
    """Returns the load addresses of a command's libraries and dynamic linker, equal in all runs.

    ``program`` is the program that the command ultimately executes.
    """
    libraries: dict[Path, int] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not libraries:
            if Path(f"/proc/{process.pid}/exe").readlink() == program:
                libraries = {
                    Path(name): start
                    for start, _, _, offset, name, _ in Maps(process.pid).mappings
                    if ".so" in name and not offset
                }
        process.kill()
    return libraries


class Instruction(NamedTuple):
    """An instruction: its address, name and operands, and its direct target, if any."""

    address: int
    name: str
    operands: str
    target: int | None


class Calls:
    """The calls in a program that has symbols and is linked at fixed addresses.

    ``libraries`` maps additional, possibly stripped files to their load addresses.
    """

    def __init__(self, path: Path, libraries: Mapping[Path, int] | None = None) -> None:
        self._names: dict[int, str] = {}
        self._targets: dict[int, int | None] = {}  # call targets, by return address
        self._trampolines: set[int] = set()  # addresses to which signal handlers return
        # addresses of the code that calls exit(2), where thread stacks end
        self._exits: set[int] = set()
        self._jumps: defaultdict[int, set[int]] = defaultdict(set)  # jump targets by function
        code = []
        for file, base in {path: 0, **(libraries or {})}.items():
            self._names |= _read_names(file, base)
            code += _disassemble(file, base)
        for this, following in itertools.pairwise(code):
            if this.operands.startswith(_SIGRETURN) and following.name == "syscall":
                self._trampolines.add(this.address)
            if this.name == "call":
                self._targets[following.address] = this.target
                if this.target:
                    self._names.setdefault(this.target, "?")
        self._starts = sorted(self._names)
        for at, instruction in enumerate(code):
            if instruction.name == "hlt":
                self._exits |= {each.address for each in code[at - _EXIT_LENGTH : at]}
            if instruction.name.startswith("j"):
                self._add_jump(instruction.address, instruction.target)

    def _add_jump(self, at: int, target: int | None) -> None:
        if not target or self._start(target) != self._start(at):
            self._jumps[self._start(at)].add(self._start(target) if target else _ANY)

    def name(self, pc: int) -> str:
        return self._names.get(self._start(pc), "?")

    def _start(self, pc: int) -> int:
        index = bisect.bisect_right(self._starts, pc) - 1
        return self._starts[index] if index >= 0 else 0

    def find_wrong(
        self, addresses: Sequence[int], sources: Sequence[FrameSource], *, is_complete: bool
    ) -> str:
        """Describes the first frame that did not call the previous frame; "" if every frame did.

        Frames are in leaf-first order. ``is_complete``: whether the last frame is the outermost.
        """
        callee = self._start(addresses[0])
        outermost = addresses[-1]
        for at, source in zip(addresses[1:], sources[1:], strict=True):
            if source is FrameSource.SIGNAL:
                callee = self._start(at)
                continue
            if at in self._trampolines:
                continue
            if at not in self._targets:
                return f"{at:#x} in {self.name(at)} follows no call"
            target = self._targets[at]
            if target is not None and not {callee, _ANY} & self._reachable(target):
                return f"{self.name(at - 1)} calls {self.name(target)}, not {self.name(callee)}"
            callee = self._start(at - 1)
        is_outermost = self.name(callee) in _OUTERMOST or outermost in self._exits
        if is_complete and not is_outermost:
            return f"ends with {self.name(callee)}"
        return ""

    def _reachable(self, start: int) -> set[int]:
        reached, waiting = {start}, [start]
        while waiting:
            for other in self._jumps[waiting.pop()] - reached:
                reached.add(other)
                waiting.append(other)
        return reached


def describe_wrong(stacks: Iterable[UserStack], calls: Calls) -> Counter[str]:
    texts = (
        calls.find_wrong(stack.addresses, stack.sources, is_complete=stack.end is StackEnd.COMPLETE)
        for stack in stacks
    )
    return Counter(filter(None, texts))


def _read_names(file: Path, base: int) -> dict[int, str]:
    names: dict[int, str] = {}
    for line in _run("nm", *(["-D"] if ".so" in file.name else []), "--defined-only", file):
        address, kind, name = line.split()
        if kind in "tTwW":
            start = base + int(address, 16)
            names.setdefault(start, name)
            if not name.startswith("_"):
                names[start] = name
    return names


def _disassemble(file: Path, base: int) -> Iterator[Instruction]:
    for line in _run("objdump", "-d", "--no-show-raw-insn", file):
        if match := _LINE.match(line):
            target = base + int(match[4], 16) if match[4] else None
            yield Instruction(base + int(match[1], 16), match[2], match[3], target)


def _run(*command: str | Path) -> list[str]:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
