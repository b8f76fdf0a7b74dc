// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Recognizes call instructions before return addresses, and the first and last instructions of
 * functions with frame pointers.
 *
 * The code is branchless: bcc inlines it in a loop, where the verifier would explore each branch for
 * every frame.
 */
#pragma once

#include "loaders.bpf.h"

enum call_site { NOT_A_CALL, A_CALL, NOT_READABLE };

/* Yields 1 if the bits of `x` in `mask` equal `value` (mask below 2^63), else 0. */
#define MATCHES(x, mask, value) ((((x) & (mask##ULL)) ^ (value##ULL)) - 1) >> 63

/* Returns whether these eight bytes (last byte most significant) may end with an x86-64 call. */
INLINE u64 is_x86_call(u64 x)
{
	u64 high = x >> 8; /* drops the lowest byte, to keep the masks below 2^63 */

	return (MATCHES(high, 0x00000000ff0000, 0x00000000e80000)) | /* rel32 */
	       (MATCHES(high, 0xf8ff0000000000, 0xd0ff0000000000)) | /* *reg */
	       (MATCHES(high, 0xf8ff0000000000, 0x10ff0000000000)) | /* *(reg) */
	       (MATCHES(high, 0x00f8ff00000000, 0x0050ff00000000)) | /* *disp8(reg) */
	       (MATCHES(high, 0x00ffff00000000, 0x0014ff00000000)) | /* *(sib) */
	       (MATCHES(high, 0x0000ffff000000, 0x000054ff000000)) | /* *disp8(sib) */
	       (MATCHES(high, 0x00000000f8ff00, 0x0000000090ff00)) | /* *disp32(reg) */
	       (MATCHES(high, 0x00000000ffff00, 0x0000000015ff00)) | /* *disp32(%rip) */
	       (MATCHES(high, 0x0000000000ffff, 0x000000000094ff)) | /* *disp32(sib) */
	       (MATCHES(high, 0x0000000000ffff, 0x000000000014ff));
}

/* Returns whether the upper four bytes are BL, BLR, or BLR with authentication. */
INLINE u64 is_a64_call(u64 x)
{
	u64 word = x >> 32;

	return (MATCHES(word, 0xfc000000, 0x94000000)) | (MATCHES(word, 0xfffffc1f, 0xd63f0000)) |
	       (MATCHES(word, 0xfefff800, 0xd63f0800));
}

enum { A_FRAME = 2 };

/*
 * Returns the number of words that an interrupted function has pushed to set up its frame pointer;
 * A_FRAME once the frame is complete. x86-64 only.
 */
INLINE u32 frame_words(int a64, u64 pc)
{
	u64 x;

	if (a64 || READ_USER(x, pc - 1))
		return A_FRAME;
	if ((x & 0xff00) == 0xc300 || (x & 0xffffffff00) == 0xe5894855ULL << 8)
		return 0; /* ret; push %rbp; mov %rsp, %rbp */
	return (x & 0xffffffff) == 0xe5894855 ? 1 : A_FRAME;
}

/* Returns the value of enum call_site for the instruction before a return address. */
GLOBAL int call_before(u64 a64, u64 pc)
{
	u64 x;

	if (READ_USER(x, pc - 8))
		return NOT_READABLE;
	return a64 ? is_a64_call(x) : is_x86_call(x);
}
