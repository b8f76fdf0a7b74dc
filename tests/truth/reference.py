"""An independent unwinder: pyelftools decodes the tables, and all registers are tracked.

The unwinder works on a copy of a thread's registers and of part of its stack, and shares no code
with the BPF program or its loader.
"""

from __future__ import annotations

import bisect
import io
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tests.truth.tables import ElfTables, GoOffsets, Row

_WORD = (1 << 64) - 1
_FP, _SP, _R12, _PC = 6, 7, 12, 16  # x86-64


class Processor(NamedTuple):
    """The DWARF register numbers of a processor, and its other properties.

    Attributes:
        sp: the number of the stack pointer. ``pc`` and ``ra`` are the numbers of the program
            counter and the return address.
        scratch: the registers that a call does not preserve.
        mask: selects the address bits of a return address.
        sigreturn: the code of signal trampolines without a table entry; empty if all have an entry.
        saved_at: stack pointer offsets of the registers saved in a signal frame, by DWARF number.
        instruction: the size of the shortest instruction, in bytes.
    """

    sp: int
    pc: int
    ra: int
    scratch: tuple[int, ...]
    mask: int
    sigreturn: bytes = b""
    saved_at: tuple[int, ...] = ()
    instruction: int = 1


X86_64 = Processor(_SP, _PC, _PC, (0, 1, 2, 4, 5, 8, 9, 10, 11), _WORD)
# sigreturn: mov x8, #139; svc #0. struct rt_sigframe: siginfo (128 bytes), then ucontext with
# sigcontext at offset 176, which contains the fault address, x0 to x30, sp and pc.
ARM64 = Processor(
    31, 32, 30, (*range(19), 30), (1 << 48) - 1, bytes.fromhex("681180d2010000d4"),
    tuple(128 + 176 + 8 + 8 * number for number in range(33)), 4,
)  # fmt: skip

_PROLOGUE = b"\x55\x48\x89\xe5"  # push %rbp; mov %rsp, %rbp
_RETURN = b"\xc3"
_SYSCALL = b"\x0f\x05"

# Go runtime functions that handle stacks (runtime/asm_amd64.s, runtime/sys_linux_amd64.s).
_GO_OUTERMOST = ("runtime.mstart", "runtime.rt0_go", "runtime.goexit")
_GO_INJECTED = ("runtime.asyncPreempt", "runtime.sigpanic", "runtime.cgocallback")
_GO_SWITCHES = (
    "runtime.systemstack",
    "runtime.nanotime1",
    "time.now",
    "runtime.walltime",
    "runtime.vgetrandom1",
    "runtime.morestack",
    "runtime.mcall",
    "runtime.sigreturn__sigaction",
    "gogo",
    "runtime.asmcgocall",
)


class Maps:
    """A process's executable mappings, and the unwind tables for their files."""

    _tables: ClassVar[dict[tuple[str, str], ElfTables | None]] = {}
    """The tables, cached by device and inode since files do not change while tests run."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mappings = list(self.parse(Path(f"/proc/{pid}/maps").read_text()))
        self._starts = [mapping[0] for mapping in self.mappings]

    @staticmethod
    def parse(maps: str) -> Iterator[tuple[int, int, str, int, str, tuple[str, str]]]:
        """Parses the start, end, permissions, offset, name, and file identity of each mapping."""
        for line in maps.splitlines():
            fields = line.split(None, 5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            name = fields[5] if len(fields) > 5 else ""
            yield start, end, fields[1], int(fields[2], 16), name, (fields[3], fields[4])

    @classmethod
    def forget(cls) -> None:
        cls._tables.clear()

    def find(self, pc: int) -> Any:
        """Returns the executable mapping that contains a program counter, or None."""
        index = bisect.bisect_right(self._starts, pc) - 1
        if index < 0 or pc >= self.mappings[index][1] or "x" not in self.mappings[index][2]:
            return None
        return self.mappings[index]

    def tables(self, mapping: Any) -> ElfTables | None:
        start, end, _, _, name, identity = mapping
        if name == "[vdso]":
            identity = ("vdso", "")
        elif not name.startswith("/"):
            return None
        if identity not in self._tables:
            self._tables[identity] = self._read(start, end, name)
        return self._tables[identity]

    def go_offsets(self) -> GoOffsets | None:
        known = (self.tables(m) for m in self.mappings if "x" in m[2])
        return next((tables.go for tables in known if tables and tables.go), None)

    def _read(self, start: int, end: int, name: str) -> ElfTables | None:
        if name == "[vdso]":
            with open(f"/proc/{self.pid}/mem", "rb") as memory:
                memory.seek(start)
                return ElfTables(io.BytesIO(memory.read(end - start)))
        try:
            content = Path(f"/proc/{self.pid}/map_files/{start:x}-{end:x}").read_bytes()
            return ElfTables(io.BytesIO(content))
        except (OSError, AssertionError, ValueError):
            return None

    def code(self, address: int, size: int) -> bytes:
        """Reads the process's memory; the result is empty if the address is not mapped."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            try:
                return os.pread(memory.fileno(), size, address)
            except OSError:
                return b""

    def follows_call(self, address: int) -> bool:
        """Returns whether an address is in code and follows what may be a call instruction."""
        if not 8 <= address < 1 << 47 or self.find(address - 1) is None:
            return False
        code = self.code(address - 7, 7)
        return code[2:3] == b"\xe8" or b"\xff" in code

    def describe(self, pc: int) -> str:
        mapping = self.find(pc)
        if mapping is None:
            return f"?{pc:x}"
        return f"{os.path.basename(mapping[4]) or 'anonymous'}+{pc - mapping[0] + mapping[3]:x}"


class Memory(NamedTuple):
    """A copy of the memory that starts at ``base``."""

    base: int
    data: bytes


class Dump(NamedTuple):
    """The registers by DWARF number, and copies of stacks.

    Attributes:
        goroutine: the stack pointer and program counter that Go's scheduler saved for the thread's
            goroutine, if the thread is on another stack; else None.
    """

    registers: Sequence[int]
    stacks: Sequence[Memory]
    goroutine: tuple[int, int] | None = None

    def word(self, address: int) -> int:
        """Returns a word from a copied stack; raises ``LookupError`` if the word was not copied."""
        for base, data in self.stacks:
            if 0 <= address - base <= len(data) - 8:
                return int(struct.unpack_from("=Q", data, address - base)[0])
        raise LookupError(address)


class Truth(NamedTuple):
    """The frame addresses, leaf first, and why the walk ended (``end`` if complete)."""

    frames: list[int]
    end: str

    @property
    def complete(self) -> bool:
        return self.end == "end"


class _EndError(Exception):
    """Raised if a frame has no caller, or if the caller's frame cannot be found."""


def unwind(maps: Maps, dump: Dump, limit: int = 127, processor: Processor = X86_64) -> Truth:
    """Unwinds a dump as far as the unwind tables and the copied stacks allow."""
    registers = dict(enumerate(dump.registers))
    frames, leaf = [registers[processor.pc]], True
    try:
        while len(frames) < limit:
            registers, leaf = _step(maps, registers, dump, leaf, processor)
            frames.append(registers[processor.pc])
    except LookupError:
        return Truth(frames, "outside of the dump")
    except (_EndError, NotImplementedError) as error:
        return Truth(frames, str(error))
    return Truth(frames, "limit")


def _step(
    maps: Maps, registers: dict[int, int], dump: Dump, leaf: bool, processor: Processor
) -> tuple[dict[int, int], bool]:
    """Returns the caller's registers, and whether it was interrupted and made no call."""
    pc = registers[processor.pc] - (not leaf)
    mapping = maps.find(pc)
    if mapping is None:
        raise _EndError("no mapping")
    tables = maps.tables(mapping)
    address = tables.address(pc - mapping[0] + mapping[3]) if tables else None
    if tables is None or address is None:
        return _without_table(maps, registers, dump, leaf, processor), False
    row = tables.row(address)
    if row is None and leaf and maps.code(pc - 2, 2) == _SYSCALL:
        row = tables.row(address - 1)
    if row is None:
        code = processor.sigreturn
        if code and maps.code(registers[processor.pc], len(code)) == code:
            saved = [dump.word(registers[processor.sp] + at) for at in processor.saved_at]
            return dict(enumerate(saved)), True
        if tables.go:
            raise _EndError("no entry")
        if leaf and processor is X86_64 and maps.follows_call(dump.word(registers[_SP])):
            raise _EndError("no table entry, and possibly no frame pointer")
        return _without_table(maps, registers, dump, leaf, processor), False
    function = tables.go_function(address)
    if function in _GO_OUTERMOST or (function == "runtime.mcall" and not leaf):
        raise _EndError("end")
    if function == "runtime.morestack" and not leaf:
        return dict(zip((_SP, _PC), _goroutine(dump), strict=True)), False
    own = _on_own_stack(function, registers, dump, leaf)
    result = _caller(tables, row, own, dump, processor)
    if result is None or not result.get(processor.pc):
        raise _EndError("end")
    if _starts_goroutine(maps, tables, result[processor.pc], processor):
        raise _EndError("end")
    return result, row.signal or function in _GO_INJECTED


def _starts_goroutine(maps: Maps, tables: ElfTables, pc: int, processor: Processor) -> bool:
    """Returns whether a program counter is the return address of a goroutine's first function.

    The return address of ``runtime.goexit1``, by contrast, is further into ``runtime.goexit``.
    """
    mapping = maps.find(pc) if tables.go else None
    address = tables.address(pc - mapping[0] + mapping[3]) if mapping else None
    if address is None or tables.go_function(address) != "runtime.goexit":
        return False
    first = address - processor.instruction
    return tables.go_function(first) == "runtime.goexit" != tables.go_function(first - 1)


def _without_table(
    maps: Maps, registers: dict[int, int], dump: Dump, leaf: bool, processor: Processor
) -> dict[int, int]:
    """Returns the caller's registers for an x86-64 function that uses a frame pointer."""
    if processor is not X86_64:
        raise _EndError("no entry")
    fp, sp = registers[_FP], registers[_SP]
    code = maps.code(registers[_PC] - 1, 5) if leaf else b""
    if code[1:] == _PROLOGUE or code[1:2] == _RETURN:
        return {_FP: fp, _PC: dump.word(sp), _SP: sp + 8}
    if code[:4] == _PROLOGUE:
        return {_FP: dump.word(sp), _PC: dump.word(sp + 8), _SP: sp + 16}
    if fp < sp:
        raise _EndError("no frame pointer")
    return {_FP: dump.word(fp), _PC: dump.word(fp + 8), _SP: fp + 16}


def _goroutine(dump: Dump) -> tuple[int, int]:
    if dump.goroutine is None:
        raise NotImplementedError("the thread is on its goroutine's stack")
    return dump.goroutine


def _on_own_stack(
    function: str, registers: dict[int, int], dump: Dump, leaf: bool
) -> dict[int, int]:
    """Returns the registers as they were before a Go runtime function switched stacks."""
    if function not in _GO_SWITCHES:
        return registers
    if leaf:
        raise NotImplementedError(function)
    by_runtime = function in ("runtime.systemstack", "runtime.asmcgocall")
    sp = _goroutine(dump)[0] if by_runtime else registers[_R12]
    return registers | {_SP: sp}


class _Frame(NamedTuple):
    """The ELF tables, registers and stack dump used to evaluate a frame's unwind rules."""

    tables: ElfTables
    registers: dict[int, int]
    dump: Dump


def _caller(
    tables: ElfTables, row: Row, registers: dict[int, int], dump: Dump, processor: Processor
) -> dict[int, int] | None:
    frame = _Frame(tables, registers, dump)
    cfa_rule = row.rules["cfa"]
    if cfa_rule.expr is not None:
        cfa = _evaluate(frame, cfa_rule.expr)
    else:
        cfa = registers[cfa_rule.reg] + cfa_rule.offset & _WORD
    result = {} if row.go else dict(registers)
    if not row.signal:
        for register in processor.scratch:
            result.pop(register, None)
    result[processor.sp] = cfa
    if processor.ra not in row.rules and processor.ra != processor.pc:
        result[processor.ra] = registers[processor.ra]  # a leaf function that has not saved ra
    for register, rule in row.rules.items():
        if register in ("pc", "cfa"):
            continue
        if rule.type == "UNDEFINED":
            if register == processor.ra:
                return None
            result.pop(register, None)
            continue
        value = _value(frame, register, rule, cfa)
        if value is None:
            result.pop(register, None)
        else:
            result[register] = value
    if processor.ra in result:
        result[processor.pc] = result[processor.ra] & processor.mask
    return result


def _value(frame: _Frame, register: int, rule: Any, cfa: int) -> int | None:
    match rule.type:
        case "OFFSET":
            return frame.dump.word(cfa + rule.arg)
        case "VAL_OFFSET":
            return int(cfa + rule.arg)
        case "SAME_VALUE":
            return frame.registers.get(register)
        case "REGISTER":
            return frame.registers.get(rule.arg)
        case "EXPRESSION":
            return frame.dump.word(_evaluate(frame, rule.arg))
        case "VAL_EXPRESSION":
            return _evaluate(frame, rule.arg)
    raise NotImplementedError(rule.type)


def _evaluate(frame: _Frame, code: Any) -> int:
    stack: list[int] = []
    for operation in frame.tables.expressions.parse_expr(list(code)):
        name, arguments = operation.op_name.removeprefix("DW_OP_"), operation.args
        if name.startswith("breg"):
            stack.append(frame.registers[int(name[4:])] + arguments[0] & _WORD)
        elif name.startswith("lit"):
            stack.append(int(name[3:]))
        elif name == "deref":
            stack.append(frame.dump.word(stack.pop()))
        elif name == "plus_uconst":
            stack.append(stack.pop() + arguments[0] & _WORD)
        elif name in ("and", "ge", "shl", "plus"):
            right, left = stack.pop(), stack.pop()
            results = {
                "and": left & right,
                "ge": int(left >= right),
                "shl": left << min(right, 64),
                "plus": left + right,
            }
            stack.append(results[name] & _WORD)
        else:
            raise NotImplementedError(name)
    return stack[-1]
