"""A program whose stacks are the worst case for table-based unwinding.

Each frame is in a different file from its caller. For each frame, the unwinder therefore searches
the process's mapping tree, and a large table that is not in the processor's caches. Consecutive
entries have different CIEs. Between calls, the leaf function reads more than the caches hold.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_LIBRARY = """
.macro step number, first
step\\number:
	.cfi_startproc
	\\first
	sub $FRAME + 16 * \\number, %rsp
	.cfi_adjust_cfa_offset FRAME + 16 * \\number
OPERATIONS
	mov (%rdi), %rax
	add $8, %rdi
	call *%rax
	add $FRAME + 16 * \\number, %rsp
	.cfi_adjust_cfa_offset -FRAME - 16 * \\number
	ret
	.cfi_endproc
	.pushsection .data.rel.local
	.quad step\\number
	.popsection
.endm

.macro padding
	.rept PADDING
	.cfi_startproc
	.skip 16, 0x90
	.cfi_endproc
	.endr
.endm

.section .data.rel.local, "aw"
.globl steps
steps:
.text
STEPS
.section .data.rel.local
	.quad 0
.section .note.GNU-stack, "", @progbits
"""
_DRIVER = """
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { DEEP = 126, BYTES = 1 << 26 };
typedef void (*function)(void *);
static volatile char *memory;
static volatile unsigned seed = 1;

static unsigned number(unsigned below)
{
	seed = seed * 1103515245 + 12345;
	return (seed >> 8) % below;
}

static void leaf(void *unused)
{
	(void)unused;
	for (int round = 0; round < 200000; round++)
		memory[number(BYTES / 64) * 64]++;
}

int main(int count, char **paths)
{
	static function step[64][1024], chain[DEEP + 1];
	int steps = 0;

	memory = malloc(BYTES);
	memset((char *)memory, 1, BYTES);
	for (int at = 1; at < count; at++) {
		void *library = dlopen(paths[at], RTLD_NOW);
		function *found = dlsym(library, "steps");

		for (steps = 0; found[steps]; steps++)
			step[at - 1][steps] = found[steps];
	}
	for (;;) {
		for (int at = 0; at < DEEP; at++)
			chain[at] = step[at % (count - 1)][number(steps)];
		chain[DEEP] = leaf;
		chain[0](chain + 1);
	}
}
"""
_STEPS = 64

KINDS: Final[Mapping[str, str]] = {
    "short entries": "",
    "entries of 40 operations": ".rept 40\n.cfi_escape 0\n.endr",
    "entries of 600 operations": ".rept 300\n.cfi_remember_state\n.cfi_restore_state\n.endr",
}
"""The assembler directives that precede each call, by kind."""


def build(
    folder: Path,
    kind: str,
    *,
    files: int = 24,
    entries: int = 60_000,
    frame_bytes: int = 4088,
    alike: bool = True,
) -> list[str]:
    """Compiles the program, and returns the command that runs it.

    Args:
        folder: the output directory.
        kind: a key of :data:`KINDS`.
        files: the number of alternating files, each with a mapping and a table.
        entries: the approximate number of entries in each file's search table.
        frame_bytes: the size of the smallest stack frame, which is 8 plus a multiple of 16.
        alike: whether all files are identical; otherwise, function frame sizes vary between files.
    """
    driver, paths = str(folder / "driver"), [str(folder / f"{n}.so") for n in range(files)]
    compile_driver = ["gcc", "-x", "c", "-O2", "-o", driver, "-"]
    subprocess.run(compile_driver, input=_DRIVER, text=True, check=True)
    for number, path in enumerate(paths):
        if number and alike:
            shutil.copy(paths[0], path)
            continue
        source = _library(kind, entries, frame_bytes + 16 * number)
        command = ["gcc", "-x", "assembler", "-shared", "-nostdlib", "-o", path, "-"]
        subprocess.run(command, input=source, text=True, check=True)
    return [driver, *paths]


def _library(kind: str, entries: int, frame_bytes: int) -> str:
    steps = "\n".join(
        f'padding\nstep {number}, "{".cfi_same_value 14" if number % 2 else ""}"'
        for number in range(_STEPS)
    )
    return (
        _LIBRARY.replace("OPERATIONS", KINDS[kind])
        .replace("PADDING", str(entries // _STEPS))
        .replace("FRAME", str(frame_bytes))
        .replace("STEPS", steps)
    )
