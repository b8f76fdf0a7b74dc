"""The user unwinder is configured for the kernel and the processor."""

import struct

import pytest

from otel_kprofiler.bpf import PROCESSORS, KernelTypes, find_kernel_offsets, pack_unwind_config
from otel_kprofiler.bpf.unwind import (
    CONFIG_BYTES,
    MAX_COLUMNS,
    RB_TREE,
    KernelOffsets,
    RegisterBlock,
)
from tests.bpf_object import btf, object_btf


def object_types():
    return KernelTypes(object_btf())


OFFSETS = KernelOffsets(0, 0x1000, tuple(range(101, 123)))
MEMBERS = (
    "task_mm", "task_stack", "mm_tree", "mm_base", "mm_sequence", "mm_vdso",
    "mm_end_code", "vma_start",
    "vma_end", "vma_mm", "vma_flags", "vma_offset", "vma_file", "vma_node", "file_inode",
    "inode_number", "inode_super", "inode_generation", "inode_size",
    "inode_mtime_seconds", "inode_mtime_ns", "super_device",
)  # fmt: skip


@pytest.mark.parametrize("machine", PROCESSORS)
def test_python_and_the_compiled_program_agree_on_the_settings(machine):
    types, processor = object_types(), PROCESSORS[machine]
    packed = pack_unwind_config(processor, OFFSETS, page_bytes=4096, max_work=77)
    assert len(packed) == CONFIG_BYTES == types.size("unwind_config")

    def word(name):
        return struct.unpack_from("=I", packed, types.offset("unwind_config", name))[0]

    assert [word(name) for name in MEMBERS] == list(OFFSETS.offsets)
    names = (
        "max_work", "page_bytes", "stack_top_registers", "signal_at", "sp_column", "fp_column",
        "ra_column", "mode_at", "narrow_value",
    )  # fmt: skip
    assert [word(name) for name in names] == [
        77, 4096, 0x1000, processor.signal_at, processor.sp_column, processor.fp_column,
        processor.ra_column, processor.mode_at, processor.narrow_value,
    ]  # fmt: skip
    assert word("syscall_bytes") == len(processor.syscall)
    for name, block in (("interrupt", processor.interrupt), ("signal", processor.signal)):
        at = types.offset("unwind_config", name)
        head = struct.unpack_from("=4H", packed, at)
        assert head == (block.size, block.sp_at, block.fp_at, block.pc_at)
        first = at + types.offset("register_block", "at")
        places = struct.unpack_from(f"={MAX_COLUMNS}H", packed, first)
        assert tuple(places[: len(block.at)]) == tuple(block.at)
        assert all(place >= 512 for place in places[len(block.at) :])


@pytest.mark.parametrize(
    ("machine", "bits", "kept"),
    [("aarch64", 42, 42), ("aarch64", 47, 47), ("aarch64", 48, 48), ("aarch64", 64, 48),
     ("x86_64", 47, 64)],
)  # fmt: skip
def test_the_address_mask_removes_signatures_from_return_addresses(machine, bits, kept):
    packed = pack_unwind_config(
        PROCESSORS[machine], OFFSETS, page_bytes=4096, max_work=77, address_bits=bits
    )
    at = object_types().offset("unwind_config", "address_mask")
    assert struct.unpack_from("=Q", packed, at) == ((1 << kept) - 1,)


@pytest.mark.parametrize("machine", PROCESSORS)
def test_sp_and_fp_offsets_agree_with_all_saved_register_offsets(machine):
    processor = PROCESSORS[machine]
    for block in (processor.interrupt, processor.signal):
        assert isinstance(block, RegisterBlock)
        assert block.at[processor.sp_column] == block.sp_at
        assert block.at[processor.fp_column] == block.fp_at
        assert max(block.at) < block.size
        assert len(set(block.at)) == len(block.at)


def kernel(**changes):
    """Returns BTF with a kernel's structs. ``changes`` maps structs to new members."""
    structs = {
        "task_struct": [("mm", 8, 0), ("stack", 16, 0)],
        "mm_struct": [("", 64, 9)],
        "vm_area_struct": [
            ("vm_start", 0, 0), ("vm_end", 8, 0), ("vm_mm", 16, 0), ("vm_flags", 32, 0),
            ("vm_pgoff", 40, 0), ("vm_file", 48, 0), ("vm_rb", 56, 0),
        ],
        "file": [("f_inode", 32, 0)],
        "inode": [
            ("i_ino", 8, 0), ("i_sb", 16, 0), ("i_generation", 24, 0), ("i_size", 32, 0),
            ("i_mtime_sec", 40, 0), ("i_mtime_nsec", 48, 0),
        ],
        "super_block": [("s_dev", 16, 0)],
        "pt_regs": [("ip", 0, 0)],
        "maple_tree": [("ma_root", 8, 0)],
        "": [("mm_mt", 8, 8), ("mmap_base", 40, 0), ("mm_lock_seq", 48, 0), ("context", 56, 10),
            ("end_code", 72, 0)],
        "mm_context_t": [("vdso", 4, 0)],
        **changes,
    }  # fmt: skip
    return KernelTypes(btf(*((name, 168, members) for name, members in structs.items())))


def test_members_are_found_in_anonymous_and_named_structs():
    kernel_offsets = find_kernel_offsets(kernel())
    assert not kernel_offsets.flags & RB_TREE
    assert kernel_offsets.stack_top_registers == 16384 - 168
    named = dict(zip(MEMBERS, kernel_offsets.offsets, strict=True))
    assert (named["mm_tree"], named["mm_base"], named["mm_vdso"]) == (64 + 8 + 8, 104, 124)


@pytest.mark.parametrize(("page_kib", "stack_kib"), [(4, 16), (16, 16), (64, 64)])
def test_registers_are_at_the_top_of_a_kernel_stack_for_every_page_size(page_kib, stack_kib):
    kernel_offsets = find_kernel_offsets(kernel(), page_kib * 1024)
    assert kernel_offsets.stack_top_registers == stack_kib * 1024 - 168


def test_kernels_that_keep_mappings_in_a_red_black_tree_are_supported():
    members = [
        ("mm_rb", 8, 0), ("mmap_base", 40, 0), ("context", 56, 10), ("end_code", 72, 0),
    ]  # fmt: skip
    kernel_offsets = find_kernel_offsets(kernel(**{"": members}))
    assert kernel_offsets.flags == RB_TREE
    named = dict(zip(MEMBERS, kernel_offsets.offsets, strict=True))
    assert (named["mm_tree"], named["mm_sequence"], named["vma_node"]) == (72, 0, 56)


@pytest.mark.parametrize("name", ["i_mtime", "__i_mtime"])
def test_older_kernels_that_store_inode_times_in_structs_are_supported(name):
    members = [("i_ino", 8, 0), ("i_sb", 16, 0), ("i_generation", 24, 0), ("i_size", 32, 0)]
    time = [("tv_sec", 0, 0), ("tv_nsec", 8, 0)]
    kernel_offsets = find_kernel_offsets(kernel(inode=[*members, (name, 64, 11)], timespec64=time))
    named = dict(zip(MEMBERS, kernel_offsets.offsets, strict=True))
    assert (named["inode_mtime_seconds"], named["inode_mtime_ns"]) == (64, 72)


@pytest.mark.parametrize(
    "changes",
    [{"task_struct": [("stack", 16, 0)]}, {"file": []}, {"vm_area_struct": [("vm_start", 0, 0)]}],
)
def test_a_kernel_with_unexpected_structs_is_not_supported(changes):
    assert find_kernel_offsets(kernel(**changes)) is None
