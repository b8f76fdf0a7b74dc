// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Unwinds the user stack of the interrupted thread, frame by frame:
 *
 * 1. with the rule in the file's .eh_frame, or in a table that code_frames.py generated;
 * 2. in a signal trampoline, with the registers that the kernel saved;
 * 3. in a leaf without a rule, if its file has rules, with a guess: the top stack word (arm64: LR);
 * 4. in code without tables (JIT, Go), with the frame pointer.
 *
 * In all cases, a return address must be executable, and must follow a call or be the start of a
 * signal trampoline. This check is skipped if a table led to code that cannot be read. The walk stops in a
 * file whose table is not loaded yet, because its code may use the frame pointer register for other
 * values.
 */
#pragma once

#include "call_sites.bpf.h"
#include "unwind_eh_frame.bpf.h"
#include "unwind_mappings.bpf.h"

enum {
	WORK_PER_FRAME = 15,
	MAX_FP_DISTANCE = 1 << 24,
};

/* Returns whether the thread has just entered the kernel with the instruction before pc. */
INLINE int after_syscall(const struct unwind_config *c, u64 pc)
{
	u64 x = 0;
	u32 bytes = c->syscall_bytes & 7;

	return !bpf_probe_read_user(&x, bytes, (void *)(pc - bytes)) && x == c->syscall;
}

INLINE int at_sigreturn(const struct unwind_config *c, u64 pc)
{
	u64 x;

	return !READ_USER(x, pc) && x == c->sigreturn;
}

/* Returns whether pc is in runtime.goexit, the outermost frame of a goroutine: it has no caller. */
INLINE int at_goexit(const struct unwind_config *c, u64 pc)
{
	u64 x;

	return c->goexit && !READ_USER(x, pc - c->goexit_back) &&
	       (x & c->goexit_mask) == c->goexit;
}

/* Reads a register that the walk tracks, or any register in `block`; returns 0 on success. */
INLINE int get_register(struct unwind_work *w, const struct unwind_config *c, u32 column, u64 *value)
{
	u64 at;
	u32 place;

	if (column == c->sp_column) {
		*value = w->sp;
		return w->sp_lost;
	}
	if (column == c->fp_column) {
		*value = w->fp;
		return w->fp_lost;
	}
	if (w->registers == NO_BLOCK)
		return 1;
	column &= MAX_COLUMNS - 1;
	place = c->preserved[column];
	at = w->preserved[place & (MAX_PRESERVED - 1)];
	if (w->called && !place)
		return 1;
	if (place && at) {
		if (READ_USER(w->pair[0], at))
			return 1;
		*value = w->pair[0];
		return 0;
	}
	at = w->registers == INTERRUPT_BLOCK ? c->interrupt.at[column] : c->signal.at[column];
	if (at >= MAX_BLOCK_BYTES)
		return 1;
	BOUND(at, MAX_BLOCK_BYTES - 1);
	*value = *(u64 *)((u8 *)w->block + at);
	return 0;
}

INLINE u64 block_word(struct unwind_work *w, u64 at)
{
	BOUND(at, MAX_BLOCK_BYTES - 1);
	return *(u64 *)((u8 *)w->block + at);
}

/* Selects a block as the source of the registers. */
INLINE void take_block(struct unwind_work *w, u32 registers)
{
	w->registers = registers;
	w->called = 0;
#pragma clang loop unroll(full)
	for (u32 i = 1; i < MAX_PRESERVED; i++)
		w->preserved[i] = 0;
}

/* Updates the locations of the callee-saved registers for the caller's frame. */
INLINE void follow_preserved(struct unwind_work *w, const struct row *row, u64 cfa)
{
	w->called = 1;
#pragma clang loop unroll(full)
	for (u32 i = 1; i < MAX_PRESERVED; i++) {
		s64 words = row->preserved[i];

		if (words != STILL_THERE)
			w->preserved[i] = words == LOST ? 1 : cfa + words * 8;
	}
}

INLINE int stop(struct unwind_work *w, u32 end)
{
	w->end = end;
	return 1;
}

/* Steps over a signal frame: the kernel saved all registers above the stack pointer. */
INLINE int step_signal(struct unwind_work *w, const struct unwind_config *c)
{
	u64 bytes = c->signal.bytes;

	if (w->sp_lost)
		return stop(w, END_NO_RULE);
	BOUND(bytes, MAX_BLOCK_BYTES - 1);
	if (bpf_probe_read_user(w->block, bytes, (void *)(w->sp + c->signal_at)))
		return stop(w, END_UNREADABLE);
	w->pc = block_word(w, c->signal.pc_at);
	w->sp = block_word(w, c->signal.sp_at);
	w->fp = block_word(w, c->signal.fp_at);
	w->fp_lost = 0;
	take_block(w, SIGNAL_BLOCK);
	w->leaf = 1;
	w->source = FROM_SIGNAL;
	return 0;
}

/* Computes the canonical frame address of a row; returns 0, or sets `end` and returns 1. */
INLINE int get_cfa(struct unwind_work *w, const struct unwind_config *c, const struct row *row,
		   u64 *cfa)
{
	if (w->sp_lost && row->cfa_kind == CFA_REGISTER && row->cfa_column == c->sp_column) {
		/* fp points to the saved fp of a function that has set up a frame record */
		if (w->fp_lost || row->fp != AT_CFA)
			return stop(w, END_NO_RULE);
		*cfa = w->fp - row->fp_offset;
		return 0;
	}
	if (get_register(w, c, row->cfa_column, cfa))
		return stop(w, END_UNSUPPORTED);
	*cfa += row->cfa_offset;
	if (row->cfa_kind == CFA_DEREFERENCED) {
		if (READ_USER(w->pair[0], *cfa))
			return stop(w, END_UNREADABLE);
		*cfa = w->pair[0] + (s64)row->post;
	} else if (row->cfa_kind >= CFA_GOROUTINE) {
		u64 goroutine, depth;

		/* address of struct g, and the frame's distance from the stack's end */
		if (READ_USER(w->pair, *cfa))
			return stop(w, END_UNREADABLE);
		goroutine = w->pair[row->cfa_kind == CFA_GOROUTINE];
		depth = w->pair[row->cfa_kind != CFA_GOROUTINE];
		if (READ_USER(w->pair[0], goroutine + 8))
			return stop(w, END_UNREADABLE);
		*cfa = w->pair[0] - depth + row->post;
	} else if (row->cfa_kind == CFA_PLT && (s32)(w->pc & 15) >= row->post) {
		*cfa += 8;
	}
	return 0;
}

/* Applies a row's rule for one register; returns 0, or sets `end` and returns 1. */
INLINE int apply_rule(struct unwind_work *w, const struct unwind_config *c, u64 cfa, u32 kind,
		      u32 from, s64 offset, u32 own, u64 *value)
{
	u64 base = cfa;

	if (kind == AT_CFA || kind == AT_REGISTER) {
		if (kind == AT_REGISTER && get_register(w, c, from, &base))
			return stop(w, END_UNSUPPORTED);
		if (READ_USER(w->pair[0], base + offset))
			return stop(w, END_UNREADABLE);
		*value = w->pair[0];
		return 0;
	}
	if (kind == SAME || kind == IN_REGISTER) {
		if (get_register(w, c, kind == SAME ? own : from, value))
			return stop(w, END_UNSUPPORTED);
		return 0;
	}
	return stop(w, END_UNSUPPORTED);
}

/* Unwinds to the caller using `rule`. */
INLINE int step_by_table(struct unwind_work *w, const struct unwind_config *c)
{
	const struct row *row = &w->rule.row;
	u64 cfa, ra, fp = 0, lost = 0;

	if (row->ra == UNDEFINED)
		return stop(w, END_COMPLETE);
	if (row->sp != SAME)
		return stop(w, END_UNSUPPORTED);
	if (get_cfa(w, c, row, &cfa))
		return 1;
	/* On arm64, calls push nothing, so a leaf that has pushed nothing has a CFA equal to sp. */
	if (!row->signal && row->cfa_kind < CFA_ELSEWHERE &&
	    (cfa < w->sp || (cfa == w->sp && !w->leaf)))
		return stop(w, END_NO_PROGRESS);
	if (row->ra == AT_CFA && row->fp == AT_CFA && row->fp_offset == row->ra_offset - 8) {
		if (READ_USER(w->pair, cfa + row->fp_offset)) /* usual case: one read */
			return stop(w, END_UNREADABLE);
		fp = w->pair[0];
		ra = w->pair[1];
	} else {
		if (apply_rule(w, c, cfa, row->ra, row->ra_column, row->ra_offset, c->ra_column, &ra))
			return 1;
		if (row->fp == SAME) {
			fp = w->fp;
			lost = w->fp_lost;
		} else if (row->fp == UNDEFINED || row->fp == NOT_UNDERSTOOD) {
			lost = 1;
		} else if (apply_rule(w, c, cfa, row->fp, row->fp_column, row->fp_offset,
				      c->fp_column, &fp)) {
			return 1;
		}
	}
	w->pc = ra & c->address_mask;
	w->sp = cfa;
	w->sp_lost = 0;
	w->fp = fp;
	w->fp_lost = lost;
	w->leaf = row->signal;
	if (row->signal) /* all registers may have changed */
		w->registers = NO_BLOCK;
	follow_preserved(w, row, cfa);
	w->source = row->signal ? FROM_SIGNAL
		  : row->disassembled ? FROM_DISASSEMBLY
				      : FROM_TABLE;
	return 0;
}

/* Finds the caller of a leaf that has no rule although its file has rules: usually a PLT entry. */
INLINE int guess_caller(struct unwind_work *w, const struct unwind_config *c)
{
	u64 ra = 0, sp = w->sp;
	u32 at = w->at;

	if (c->flags & LINK_REGISTER) {
		if (get_register(w, c, c->ra_column, &ra))
			return 0;
	} else {
		if (READ_USER(ra, sp))
			return 0;
		sp += 8;
	}
	ra &= c->address_mask;
	if (call_before(c->flags & A64_CALLS, ra) != A_CALL || find_mapping(ra - 1))
		return 0;
	/* After the leaf has made a call, LR points into the leaf itself, which has no unwind rule. */
	if (c->flags & LINK_REGISTER && w->at == at &&
	    find_rule(ra - 1 - w->kept[at & (KEPT_MAPPINGS - 1)].shift))
		return 0;
	w->pc = ra;
	w->sp = sp;
	w->leaf = 0;
	w->called = 1;
	w->source = FROM_GUESS;
	return 1;
}

INLINE int step_by_frame_pointer(struct unwind_work *w, const struct unwind_config *c)
{
	u64 fp = w->fp;
	u32 pushed = w->leaf ? frame_words(c->flags & A64_CALLS, w->pc) : A_FRAME;

	if (pushed != A_FRAME) { /* the return address is on the stack, perhaps above a saved fp */
		if (READ_USER(w->pair, w->sp + 8 * pushed - 8))
			return stop(w, END_UNREADABLE);
		w->pc = w->pair[1];
		w->sp += 8 * pushed + 8;
		if (pushed)
			w->fp = w->pair[0];
		w->leaf = 0;
		w->registers = NO_BLOCK;
		w->source = FROM_FRAME_POINTER;
		return 0;
	}
	/* fp = 0 does not prove that the stack ends: bash and Python use fp for other values. */
	if (w->fp_lost || !fp || fp < w->sp || fp & 7 || fp - w->sp > MAX_FP_DISTANCE)
		return stop(w, END_NO_RULE);
	if (READ_USER(w->pair, fp))
		return stop(w, END_UNREADABLE);
	w->pc = w->pair[1] & c->address_mask;
	w->sp = fp + 16;
	w->sp_lost = !!(c->flags & LINK_REGISTER); /* on arm64, locals may be above fp */
	w->fp = w->pair[0];
	w->leaf = 0;
	w->registers = NO_BLOCK;
	w->source = FROM_FRAME_POINTER;
	return 0;
}

/* Checks a return address; returns 0, or sets `end` and returns 1. */
INLINE int check_caller(struct unwind_work *w, const struct unwind_config *c)
{
	int call;

	if (!w->pc) /* if fp is not used as a frame pointer, it may point to zeros */
		return stop(w, w->source == FROM_FRAME_POINTER ? END_NO_RULE : END_COMPLETE);
	if (find_mapping(w->pc - !w->leaf))
		return stop(w, END_NOT_EXECUTABLE);
	if (w->leaf)
		return 0;
	call = call_before(c->flags & A64_CALLS, w->pc);
	if (call == A_CALL || at_sigreturn(c, w->pc))
		return 0;
	/*
	 * A forked child has no page-table entries for its parent's code, so the code of a caller is
	 * unreadable until the child returns to it. In this case, accepts a caller in executable memory if
	 * an unwind rule led to it.
	 */
	if (call == NOT_READABLE && w->source == FROM_TABLE)
		return 0;
	if (w->source != FROM_GUESS && at_goexit(c, w->pc))
		return stop(w, END_COMPLETE);
	return stop(w, call == NOT_A_CALL ? END_NOT_A_CALL : END_UNREADABLE);
}

/* Steps to the caller; returns 0, or sets `end` and returns 1. */
GLOBAL int step(void)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	const struct mapping *m;
	u64 address, trampoline;
	u32 error = RULE_NONE;

	if (!w || !c)
		return 1;
	w->spent += WORK_PER_FRAME;
	m = &w->kept[w->at & (KEPT_MAPPINGS - 1)];
	if (m->state == FILE_PENDING)
		return stop(w, END_PENDING);
	if (m->state == FILE_UNAVAILABLE)
		return stop(w, END_NO_RULE);
	if (m->state == FILE_LOADED) {
		address = w->pc - m->shift;
		error = find_rule(address - !w->leaf);
		/* A function may end in a system call that does not return. */
		if (error == RULE_NONE && w->leaf && after_syscall(c, w->pc))
			error = find_rule(address - 1);
		if (error == RULE_GONE)
			return stop(w, END_PENDING);
		if (error == RULE_WORK)
			return stop(w, END_WORK);
		if (error == RULE_DAMAGED)
			return stop(w, END_DAMAGED);
		if (error == RULE_UNSUPPORTED)
			return stop(w, END_UNSUPPORTED);
	}
	trampoline = w->leaf ? w->pc - c->sigreturn_bytes : w->pc;
	if ((error == RULE_NONE || w->rule.row.signal) && at_sigreturn(c, trampoline)) {
		if (step_signal(w, c))
			return 1;
	} else if (error == RULE_FOUND) {
		if (step_by_table(w, c))
			return 1;
	} else if (m->state == FILE_LOADED && w->leaf && guess_caller(w, c)) {
		return 0;
	} else if (m->state == FILE_LOADED && w->leaf && c->flags & LINK_REGISTER) {
		return stop(w, END_NO_RULE);
	} else if (step_by_frame_pointer(w, c)) {
		return 1;
	}
	return check_caller(w, c);
}

/* Appends pc to the record, with its mapping. */
INLINE void put_frame(struct unwind_work *w)
{
	struct mapping *m = &w->kept[w->at & (KEPT_MAPPINGS - 1)];
	u64 index = NO_MAPPING, frames = w->head.frames, source = w->source;
	u64 *used;

	if (m->state != NO_FILE && m->executable && m->start != m->end) {
		if (m->sample == w->sample) {
			index = m->index;
		} else if (w->head.mappings < STACK_MAPPINGS) {
			index = w->head.mappings++;
			BOUND(index, STACK_MAPPINGS);
			w->mapping[index].key = m->key;
			w->mapping[index].bias = m->bias;
			m->sample = w->sample;
			m->index = index;
			if (m->state == FILE_LOADED) {
				used = LOOKUP(table_used, &m->slot);
				if (used)
					*used = w->time_ns;
			}
		}
		if (m->moved)
			source |= IN_MOVED_TEXT;
	}
	BOUND(frames, MAX_USER_FRAMES);
	w->frame[frames] = frame_word(w->pc, index, source);
	w->head.frames = frames + 1;
}

/* Reads the thread's registers as of its kernel entry; returns 0, or sets `end` and returns 1. */
INLINE int read_registers(struct unwind_work *w, const struct unwind_config *c, u64 at)
{
	u64 bytes = c->interrupt.bytes;
	u32 mode;

	BOUND(bytes, MAX_BLOCK_BYTES - 1);
	if (bpf_probe_read_kernel(w->block, bytes, (void *)at))
		return stop(w, END_NO_USER);
	mode = block_word(w, c->mode_at);
	if ((mode & c->user_mask) != c->user_value)
		return stop(w, END_NO_USER);
	if ((mode & c->narrow_mask) == c->narrow_value)
		return stop(w, END_32_BIT);
	w->pc = block_word(w, c->interrupt.pc_at);
	w->sp = block_word(w, c->interrupt.sp_at);
	w->fp = block_word(w, c->interrupt.fp_at);
	w->fp_lost = w->sp_lost = 0;
	w->leaf = 1;
	take_block(w, INTERRUPT_BLOCK);
	w->source = FROM_REGISTERS;
	return 0;
}

/* Unwinds the current thread into head, mapping[] and frame[]; returns 0 if there is a stack. */
GLOBAL int unwind(void)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	u64 task = bpf_get_current_task(), registers, end_code;

	if (!w || !c)
		return 1;
	w->end = END_NO_USER;
	w->spent = 0;
	w->sample++;
	w->head.frames = w->head.mappings = 0;
	if (READ_KERNEL(w->mm, task + c->task_mm) || !w->mm)
		return 1;
	/* execve() sets end_code late: until then, the registers belong to the previous program. */
	if (READ_KERNEL(end_code, w->mm + c->mm_end_code) || !end_code)
		return 1;
	registers = w->user_registers;
	if (!registers) {
		if (READ_KERNEL(registers, task + c->task_stack))
			return 1;
		registers += c->stack_top_registers;
	}
	if (read_registers(w, c, registers))
		return 1;
	drop_mappings(w, c);
	if (find_mapping(w->pc)) {
		/* A jump to an invalid address: there is a leaf, but no useful mapping. */
		w->frame[0] = frame_word(w->pc, NO_MAPPING, FROM_REGISTERS);
		w->head.frames = 1;
		w->end = END_NOT_EXECUTABLE;
		return 0;
	}
	put_frame(w);
#pragma clang loop unroll(disable)
	for (int i = 1; i < MAX_USER_FRAMES; i++) {
		if (w->head.frames >= w->max_frames) {
			w->end = END_FRAMES;
			return 0;
		}
		if (w->spent > c->max_work) {
			w->end = END_WORK;
			return 0;
		}
		if (step())
			return 0;
		put_frame(w);
	}
	w->end = END_FRAMES;
	return 0;
}

/*
 * Appends the unwound stack to a record, at `at`, which has space for the largest stack; returns
 * the stack's size in bytes.
 */
INLINE u64 copy_stack(struct unwind_work *w, u8 *at)
{
	u64 first, rest;

	w->head.end = w->end;
	w->head.version = USER_STACK_VERSION;
	w->head.marker = USER_STACK_MARKER;
	first = sizeof(w->head) + w->head.mappings * sizeof(w->mapping[0]);
	rest = w->head.frames * sizeof(w->frame[0]);
	BOUND(first, 0x1ff);
	BOUND(rest, 0x3f8);
	if (bpf_probe_read_kernel(at, first, &w->head) ||
	    bpf_probe_read_kernel(at + first, rest, w->frame))
		return 0;
	return first + rest;
}
