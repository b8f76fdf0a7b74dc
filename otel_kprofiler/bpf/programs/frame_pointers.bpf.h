// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Collects user stacks without an unwinder: the kernel follows frame pointers. In code without
 * frame pointers, the kernel reports arbitrary words on the stack as return addresses, so the stack
 * is truncated at the first address that does not follow a call.
 */
#pragma once

#include "call_sites.bpf.h"
#include "user_stack.bpf.h"

/*
 * Converts an array of addresses to a user stack, in place. `at` points to space for a head,
 * followed by `bytes` bytes of addresses. Returns the stack's size in bytes; the stack may be
 * incomplete.
 */
INLINE u64 check_frames(u8 *at, u64 bytes, u64 limit, int a64)
{
	struct stack_head *head = (struct stack_head *)at;
	u64 *frame = (u64 *)(head + 1);
	u64 checked;

	head->end = bytes >= limit ? END_FRAMES : END_NO_RULE;
	head->mappings = 0;
	head->frames = 0;
	head->version = USER_STACK_VERSION;
	head->marker = USER_STACK_MARKER;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_USER_FRAMES && i * 8 < bytes; i++) {
		if (i) {
			int call = call_before(a64, frame[i]);

			if (call != A_CALL) {
				head->end = call == NOT_A_CALL ? END_NOT_A_CALL : END_UNREADABLE;
				break;
			}
		}
		frame[i] = frame_word(frame[i], NO_MAPPING,
				      i ? FROM_FRAME_POINTER : FROM_REGISTERS);
		head->frames = i + 1;
	}
	/* Reloading the count leaves the verifier with one state at the end of the loop. */
	checked = *(volatile u16 *)&head->frames;
	BOUND(checked, MAX_USER_FRAMES);
	return sizeof(*head) + checked * 8;
}
