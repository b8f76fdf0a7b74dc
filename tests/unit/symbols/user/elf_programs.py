"""Builds small programs with rarely used ELF features, for tests of user symbols."""

import os
import shutil
import subprocess

import pytest

from otel_kprofiler.elf import FileSource, read_elf
from otel_kprofiler.symbols.user.build import read_functions

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
__attribute__((noinline)) static int hidden(int x) { return x * 3 + atoi("4"); }
__attribute__((noinline)) int shown(int x) {
    if (__builtin_expect(x == 77777, 0)) abort();
    return hidden(x) + (int)strlen(getenv("HOME") ? "a" : "b");
}
int same_longer(int) __attribute__((alias("shown")));
int weak_one(int) __attribute__((weak, alias("shown")));
int main(int argc, char **argv) {
    printf("%d %s\n", shown(argc), argv[0]);
    return (int)memchr(argv[0], argc, 3);
}
"""

ASSEMBLY = r"""
.text
.p2align 4
.globl sized
.type sized,@function
sized: .cfi_startproc
    nop
inner_label: nop
inner_function: nop
.type inner_function,@function
    ret
    .cfi_endproc
.size sized,.-sized
    .fill 16,1,0xcc
.globl with_frame
.type with_frame,@function
with_frame: .cfi_startproc   # has no size
    nop
label_in_frame: ret
    .cfi_endproc
    .fill 16,1,0xcc
label_with_frame: .cfi_startproc
    nop
    ret
    .cfi_endproc
    .fill 16,1,0xcc
.globl without_frame
.type without_frame,@function
without_frame:               # without size and unwind information
    nop
    ret
    .fill 16,1,0xcc
.globl sized_label
sized_label: nop
    ret
.size sized_label,.-sized_label
"$d": .fill 16,1,0xcc       # mapping symbol of data
.type table,@object
table: .fill 16,1,0x41       # data among code
.size table,16
.globl outer
.type outer,@function
outer: nop
    nop
.type nested,@function
nested: nop
    nop
.size nested,.-nested
    nop
    ret
.size outer,.-outer
.section .text.last,"ax"
.type last,@function
last: nop
    ret
.section .note.GNU-stack,"",@progbits
"""


def build(folder, name, *options, source=SOURCE, language="c", compiler="gcc"):
    if "-fuse-ld=gold" in options and shutil.which("ld.gold") is None:
        pytest.skip("needs the linker gold")
    path = os.path.join(folder, name)
    subprocess.run(
        [compiler, "-O2", "-g0", *options, "-o", path, "-x", language, "-", "-lm"],
        input=source, text=True, check=True,
    )  # fmt: skip
    return path


def tool(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def functions_of(path, debug=None, **options):
    with open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        return read_functions(source, read_elf(source, None), lambda: debug, **options)


def symbols_of(path):
    """Returns each symbol's (address, size, type, binding) from readelf, by unversioned name."""
    results = {}
    for line in tool("readelf", "-sW", path).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit() and fields[6].isdigit():
            name = fields[7].partition("@")[0]
            results[name] = (int(fields[1], 16), int(fields[2], 0), fields[3], fields[4])
    return results


def stubs_of(path, objdump="objdump"):
    """Returns the address of each PLT stub by name, according to objdump."""
    results = []
    for line in tool(objdump, "-d", path).splitlines():
        if line.endswith("@plt>:"):
            address, _, name = line.partition(" ")
            results.append((int(address, 16), name.strip("<>:").removesuffix("@plt")))
    return results
