"""Checks stacks of a statically linked program by its calls: each caller calls its callee.

For code without unwind tables, which an independent unwinder would need. Addresses of calls and
their targets come from objdump, functions from the symbols of the program before it was stripped.
"""

from __future__ import annotations

import bisect
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from otel_kprofiler.model import FrameSource, StackEnd, UserStack
from tests.truth import dumps

_LINE = re.compile(r"^\s*([0-9a-f]+):\t(?:(?:notrack|bnd|repz|data16) )*(\w+)\s*(?:([0-9a-f]+) <)?")
_OUTERMOST = {"_start", "__clone", "clone"}
_ANY = 0  # the target of an indirect jump
_HZ = 997
_LOADING_TRIES, _LOADING_S = 60, 1
_TRAMPOLINE = "__restore_rt"


def take_stacks(built: Path, command: Sequence[str], count: int) -> list[UserStack]:
    """Takes stacks of a program, once its tables are loaded.

    Args:
        built: the program that dumps stacks.
        command: the command line.
        count: how many, at least.
    """
    stacks: list[UserStack] = []
    with (
        dumps.Dumps(built) as dumper,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            for _ in range(_LOADING_TRIES):
                taken = dumper.take(process.pid, _HZ, 40, timeout_s=_LOADING_S)
                if taken and all(dump.stack.end is not StackEnd.PENDING for dump in taken):
                    break
            while len(stacks) < count and process.poll() is None:
                wanted = min(200, count - len(stacks))
                stacks += [dump.stack for dump in dumper.take(process.pid, _HZ, wanted)]
        finally:
            process.kill()
    return stacks


class Calls:
    """The calls of a program.

    Args:
        path: the program, with symbols.
    """

    def __init__(self, path: Path) -> None:
        names: dict[int, str] = {}
        for line in _run("nm", "--defined-only", path):
            address, kind, name = line.split()
            if kind in "tTwW":
                names.setdefault(int(address, 16), name)
                if not name.startswith("_"):
                    names[int(address, 16)] = name
        self._starts = sorted(names)
        self._names = names
        self._targets: dict[int, int | None] = {}  # of calls, by return address
        self._jumps: defaultdict[int, set[int]] = defaultdict(set)  # between functions
        call: list[tuple[int | None]] = []
        for line in _run("objdump", "-d", "--no-show-raw-insn", path):
            if not (match := _LINE.match(line)):
                continue
            at = int(match[1], 16)
            if call:
                self._targets[at] = call.pop()[0]
            target = int(match[3], 16) if match[3] else None
            if match[2] == "call":
                call.append((target,))
            elif match[2].startswith("j") and (
                not target or self._start(target) != self._start(at)
            ):
                self._jumps[self._start(at)].add(self._start(target) if target else _ANY)

    def name(self, pc: int) -> str:
        """Returns the name of the function at a pc."""
        return self._names.get(self._start(pc), "?")

    def _start(self, pc: int) -> int:
        index = bisect.bisect_right(self._starts, pc) - 1
        return self._starts[index] if index >= 0 else 0

    def find_wrong(
        self, addresses: Sequence[int], sources: Sequence[FrameSource], *, is_complete: bool
    ) -> str:
        """Describes the first frame that did not call the one before; empty if all did.

        Args:
            addresses: of the frames, from the leaf.
            sources: how each frame was found. is_complete: whether the last frame is the outermost.
        """
        callee = self._start(addresses[0])
        for at, source in zip(addresses[1:], sources[1:], strict=True):
            if source is FrameSource.SIGNAL:
                callee = self._start(at)
                continue
            if self.name(at) == _TRAMPOLINE:
                continue
            if at not in self._targets:
                return f"{at:#x} in {self.name(at)} follows no call"
            target = self._targets[at]
            if target is not None and not {callee, _ANY} & self._reachable(target):
                return f"{self.name(at - 1)} calls {self.name(target)}, not {self.name(callee)}"
            callee = self._start(at - 1)
        if is_complete and self.name(callee) not in _OUTERMOST:
            return f"ends with {self.name(callee)}"
        return ""

    def _reachable(self, start: int) -> set[int]:
        reached, waiting = {start}, [start]
        while waiting:
            for other in self._jumps[waiting.pop()] - reached:
                reached.add(other)
                waiting.append(other)
        return reached


def _run(*command: str | Path) -> list[str]:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
