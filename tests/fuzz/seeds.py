"""Small real inputs from which hostile inputs are derived."""

import struct
from pathlib import Path
from runpy import run_path

_ELF = run_path(str(Path(__file__).parents[1] / "unit" / "symbols" / "test_elf.py"))

SEEDS = {
    "kallsyms": [
        (
            b"ffffffff81000000 T _text\nffffffff81000000 t __pfx_startup_64\n"
            b"ffffffff81000010 T startup_64\nffffffff81000040 W weak\nffffffff81000040 t local\n"
            b"ffffffff81000080 d data\nffffffff810000c0 T _etext\n"
            b"ffffffffc0001000 t ext4_read\t[ext4]\nffffffffc0000f00 T ext4_open\t[ext4]\n"
            b"ffffffffc0001100 d ext4_data\t[ext4]\nffffffffc0000f00 T ext4_open\t[ext4]\n"
            b"ffffffffc0003000 t ftrace_trampoline\t[__builtin__ftrace]\n"
            b"ffffffffc0005000 t bpf_prog_6deef7357e7b4530\t[bpf]\n"
        ),
        b"0000000000000000 A fixed_percpu_data\n0000000000000000 T _text\n",
    ],
    "modules": [
        (
            b"ext4 1011712 1 - Live 0xffffffffc0f00000\n"
            b"kvm 1400832 1 kvm_intel, Unloading 0xffffffffc0100000 (OE)\n"
        )
    ],
    "notes": [
        struct.pack("<III8s4s", 6, 4, 0x101, b"Linux\0", bytes(4))
        + struct.pack("<III4s20s", 4, 20, 3, b"GNU\0", bytes(range(20)))
    ],
    "ranges": [
        (
            b".text 00000000-00000000 = _text\n.text 00000010-00000040 ext4\n"
            b".text 00000040-00000080 ti_cpsw ti_cpsw_new\n.text 00000080-00000060 inverted\n"
            b".exit.text 00000100-00000100 = startup_64\n.exit.text 00000000-00000058 rapl\n"
            b".altinstr_aux 00000000-00000004 nothing\n"
        )
    ],
    "kallmodsyms": [
        (
            b"ffffffff81000000 10 T _text\nffffffff81000010 30 t a [ext4]\n"
            b"ffffffff81000040 20 b b [ti_cpsw] [ti_cpsw_new]\nffffffff81000060 t d [x]\n"
            b"ffffffff81000080 T e [x] {file.o}\nffffffff810000a0 0 T f [y]\n"
        )
    ],
    "uevent": [
        b"add@/module/ext4\0ACTION=add\0DEVPATH=/module/ext4\0SUBSYSTEM=module\0SEQNUM=2\0",
        b"remove@/module/x\0ACTION=remove\0DEVPATH=/module/x\0SUBSYSTEM=module\0SEQNUM=3\0",
    ],
    "elf": [_ELF["MODULE"]],
}
