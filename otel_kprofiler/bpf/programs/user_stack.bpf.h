// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The user stack in a record: struct stack_head, mappings, and a word for each frame, leaf first.
 * Equal stacks have identical bytes. Parsed by model/user_stack.py; change both together.
 */
#pragma once

#include "loaders.bpf.h"

enum {
	MAX_USER_FRAMES = 127,
	STACK_MAPPINGS = 15,
	NO_MAPPING = 15,   /* the frame is in anonymous memory, or mapping[] was full */
	ADDRESS_BITS = 56, /* number of address bits in a frame's word, below the bits of the mapping and the source */
	MAPPING_BITS = 4,
	USER_STACK_VERSION = 1,
	USER_STACK_MARKER = 0xffff,
	USER_STACK_BYTES = 1536, /* more than the largest stack */
};

/* Reasons why a stack ends. */
enum stack_end {
	END_COMPLETE,	 /* the walk reached a frame marked as the outermost */
	END_FRAMES,	 /* the frame limit was reached */
	END_WORK,	 /* the work limit was reached */
	END_PENDING,	 /* the file's table is not loaded yet */
	END_NO_RULE,	 /* no table entry and no frame pointer */
	END_UNREADABLE,	 /* memory is not resident */
	END_UNSUPPORTED, /* a rule is not supported, or needs a register that was not saved */
	END_NOT_EXECUTABLE,
	END_NOT_A_CALL,	 /* the return address does not follow a call */
	END_NO_PROGRESS, /* the caller's frame is not above its callee's */
	END_DAMAGED,	 /* the table is inconsistent */
	END_32_BIT,	 /* never in records: frame pointers are followed instead */
	END_NO_USER,	 /* never in records: a kernel thread, or a program that has not started yet */
};

/* Methods by which frames are found. */
enum frame_source {
	FROM_REGISTERS,
	FROM_TABLE,
	FROM_FRAME_POINTER,
	FROM_GUESS, /* no table entry: from the link register or the top of the stack */
	FROM_SIGNAL,
	FROM_DISASSEMBLY, /* from a table that user space derived from the code */
	IN_MOVED_TEXT = 8, /* additional bit: the file is that of the surrounding mappings */
};

struct file_key {
	u64 inode;
	u32 device;
	u32 generation; /* inode generation, mixed with the time of the last content change */
};

struct stack_head {
	u8 end;
	u8 mappings;
	u16 frames;
	u16 version;
	u16 marker;
};

struct stack_mapping {
	struct file_key key;
	u64 bias; /* runtime address of file offset 0 */
};

INLINE u64 frame_word(u64 pc, u64 mapping, u64 source)
{
	return (pc & ((1ULL << ADDRESS_BITS) - 1)) | mapping << ADDRESS_BITS |
	       source << (ADDRESS_BITS + MAPPING_BITS);
}
