"""Jumps and stack use in the compiled programs conform to the rules of older verifiers."""

import struct

import pytest
from elftools.elf.elffile import ELFFile

from otel_kprofiler.bpf import PROGRAMS

# include/uapi/linux/bpf_common.h and bpf.h
CLASS, JUMPS = 0x07, (0x05, 0x06)
GOTO, CALL, EXIT = 0x05, 0x85, 0x95
LOAD, STORES = 0x01, (0x02, 0x03)
COPY, ADD = 0xBF, 0x07
FRAME_POINTER, OWN_FUNCTION = 10, 1  # a register; src_reg in a call
STACK_BYTES = 512  # MAX_BPF_STACK, the sum over a call chain


def functions(path):
    """Yields the name, section code and start index of each function."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = list(elf.get_section_by_name(".symtab").iter_symbols())
        for index, section in enumerate(elf.iter_sections()):
            if not section["sh_flags"] & 4 or not section.data_size:  # SHF_EXECINSTR
                continue
            code = list(struct.iter_unpack("<BBhi", section.data()))
            for symbol in symbols:
                if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] == index:
                    yield symbol.name, code, symbol["st_value"] // 8


def successors(code, at):
    """Returns an instruction's possible successors, and whether each is the target of a jump."""
    operation, _, offset, _ = code[at]
    if operation == EXIT:
        return []
    if operation & CLASS not in JUMPS or operation == CALL:
        return [(at + 1, False)]
    target = (at + 1 + offset, True)
    return [target] if operation == GOTO else [(at + 1, True), target]


def loops_without_a_jump(code, start):
    """Returns instructions that fall through to an ancestor in the verifier's ``check_cfg``."""
    result, done = [], {start: False}
    path = [(start, iter(successors(code, start)))]
    while path:
        at, following = path[-1]
        for after, jumps in following:
            if after not in done:
                done[after] = False
                path.append((after, iter(successors(code, after))))
                break
            if not done[after] and not jumps:
                result.append(at)
        else:
            done[at] = True
            path.pop()
    return result


@pytest.mark.parametrize("name", ["sampler", "dump", "iterators"])
def test_every_loop_body_ends_with_a_jump(name):
    """Up to 5.10, the verifier rejects loops whose last instruction falls through to the first."""
    looked_at = 0
    for function, code, start in functions(PROGRAMS / f"{name}.bpf.o"):
        assert loops_without_a_jump(code, start) == [], function
        looked_at += 1
    assert looked_at >= 2


def test_a_loop_that_falls_through_to_its_start_is_detected():
    plain, goto, branch, leave = (0xB7, 0, 0, 0), (GOTO, 0, 1, 0), (0x15, 0, -3, 0), (EXIT, 0, 0, 0)
    assert loops_without_a_jump([goto, plain, plain, branch, leave], 0) == [1]
    assert loops_without_a_jump([plain, plain, (0x15, 0, -2, 0), leave], 0) == []


def stack_bytes(code):
    """Returns how many stack bytes the code uses, directly or via copies of the frame pointer."""
    deepest, copies = 1, set()
    for operation, registers, offset, number in code:
        target, source = registers & 15, registers >> 4
        kind = operation & CLASS
        if (kind == LOAD and source == FRAME_POINTER) or (
            kind in STORES and target == FRAME_POINTER
        ):
            deepest = max(deepest, -offset)
        if operation == COPY and source == FRAME_POINTER:
            copies.add(target)
        elif operation == ADD and target in copies:
            deepest = max(deepest, -number)
            copies.discard(target)
    return -(-deepest // 32) * 32


def read_calls(path):
    """Returns the name, stack bytes and callees of each function, by section and offset."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = list(elf.get_section_by_name(".symtab").iter_symbols())
        relocated = {
            (section["sh_info"], relocation["r_offset"] // 8): symbols[relocation["r_info_sym"]]
            for section in elf.iter_sections("SHT_REL")
            for relocation in section.iter_relocations()
        }
        results = {}
        for symbol in symbols:
            if symbol["st_info"]["type"] != "STT_FUNC":
                continue
            where, first = symbol["st_shndx"], symbol["st_value"] // 8
            data = elf.get_section(where).data()[8 * first : 8 * first + symbol["st_size"]]
            code, calls = list(struct.iter_unpack("<BBhi", data)), set()
            for at, (operation, registers, _, number) in enumerate(code, first):
                if operation != CALL or registers >> 4 != OWN_FUNCTION:
                    continue
                callee = relocated.get((where, at))
                if callee is None:
                    calls.add((where, at + 1 + number))
                elif callee["st_info"]["type"] == "STT_SECTION":
                    calls.add((callee["st_shndx"], number + 1))
                else:
                    calls.add((callee["st_shndx"], callee["st_value"] // 8))
            results[where, first] = symbol.name, stack_bytes(code), calls
    return results


@pytest.mark.parametrize("name", ["sampler", "dump", "iterators"])
def test_nested_calls_fit_in_the_bpf_stack(name):
    """Since Linux 6.13, the limit may apply per function; older kernels limit the total."""
    functions_of = read_calls(PROGRAMS / f"{name}.bpf.o")

    def deepest(place):
        own, used, calls = functions_of[place]
        total, chain = max((deepest(callee) for callee in calls), default=(0, ()))
        return total + used, (own, *chain)

    for place in functions_of:
        used, chain = deepest(place)
        assert used <= STACK_BYTES, chain
    assert name != "sampler" or max(map(deepest, functions_of))[0] > 300, "calls are followed"
