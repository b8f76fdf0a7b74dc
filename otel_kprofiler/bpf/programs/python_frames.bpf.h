// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Walks the interrupted thread's CPython frames, leaf first.
 *
 * The thread is stopped, so only data that the thread itself was writing can be incomplete.
 * The walk fails on any unexpected value: frames are never guessed.
 */
#pragma once

#include "python_code.bpf.h"
#include "python_discovery.bpf.h"
#include "python_thread.bpf.h"

enum frame_owners {
	OWNED_BY_GENERATOR = 1,
};

enum {
	GO_ON = -1, /* must differ from all python_outcomes */
	STACKS_MASK = 0xfff, /* above the maximum total size of the kernel and user stacks */
};

#define NO_WINDOW_AT (1ULL << 62) /* not an address in any process */

INLINE u64 frame_word_at(const u8 *frame, u64 at)
{
	BOUND(at, FRAME_BYTES - 8);
	return *(const u64 *)(frame + at);
}

INLINE u8 frame_byte_at(const u8 *frame, u64 at)
{
	BOUND(at, FRAME_BYTES - 1);
	return frame[at];
}

/*
 * Returns the frame at an address. Callers' frames are usually at lower addresses, so some memory
 * below the frame is copied as well, if readable.
 */
INLINE const u8 *get_frame(struct python_work *w, const struct python_layout *l, u64 at)
{
	u64 place = at - w->window_at, bytes = l->frame_bytes;

	BOUND(bytes, FRAME_BYTES - 1);
	if (place > FRAME_WINDOW) {
		place = FRAME_WINDOW;
		w->window_at = at - FRAME_WINDOW;
		if (bpf_probe_read_user(w->window, FRAME_WINDOW + bytes, (void *)w->window_at)) {
			w->window_at = NO_WINDOW_AT;
			if (bpf_probe_read_user(w->window + FRAME_WINDOW, bytes, (void *)at))
				return 0;
		}
	}
	BOUND(place, 2 * FRAME_WINDOW - 1);
	return place > FRAME_WINDOW ? 0 : w->window + place;
}

/* Appends a frame's word, which put_entry() may later mark as entered from C. */
INLINE int put_word(struct python_work *w, u64 word)
{
	u64 at = w->head.frames;

	BOUND(at, MAX_PYTHON_FRAMES);
	w->word[at] = word;
	w->head.frames = at + 1;
	w->open = word & FROM_C ? 0 : at + 1;
	return GO_ON;
}

/* Marks the last frame as entered from C code. */
INLINE int put_entry(struct python_work *w)
{
	u64 above = w->open - 1;

	w->rooted = 1;
	if (!w->open)
		return GO_ON;
	BOUND(above, MAX_PYTHON_FRAMES);
	w->word[above] |= FROM_C;
	w->open = 0;
	return GO_ON;
}

/* Checks the address of the frame whose code was copied; returns an outcome, or GO_ON if valid. */
INLINE int check_place(struct python_work *w, const struct python_layout *l, u64 at, u32 owner,
		       s64 instruction)
{
	u64 chunk, used, end, bytes;
	u8 state;

	if (owner == OWNED_BY_GENERATOR) {
		if (READ_USER(state, at - l->generator_state_back))
			return PYTHON_UNREADABLE;
		return state == l->generator_executing ? GO_ON : PYTHON_NOT_RUNNING;
	}
	chunk = thread_word(w, l->thread_chunk);
	used = thread_word(w, l->thread_chunk + 8);
	end = thread_word(w, l->thread_chunk + 16);
	if (w->seen > 1 || at - chunk >= end - chunk)
		return GO_ON;
	bytes = 8 * (u64)code_half(w, l->code_frame_words);
	if (l->frame_header)
		bytes = 8 * (u64)(code_half(w, l->code_stack_words) +
				  code_half(w, l->code_variables)) +
			l->frame_header;
	if (w->seen)
		return w->top_at && at + bytes != w->top_at ? PYTHON_NOT_ADJACENT : GO_ON;
	if (instruction <= 0)
		w->top_at = at;
	return at + bytes > used ? PYTHON_UNUSED : GO_ON;
}

/* Reads the frame of a function; returns GO_ON, or the outcome that ends the walk. */
INLINE int read_function(struct python_work *w, const struct python_layout *l, const u8 *frame,
			 u64 at, u32 owner)
{
	u64 code = frame_word_at(frame, l->frame_code) & ~3ULL; /* the low bits are a tag in 3.14 */
	s64 instruction;
	u64 word;
	int problem;

	if (!read_code(w, l, code))
		return PYTHON_NOT_CODE;
	instruction = (s64)(frame_word_at(frame, l->frame_instruction) - code - l->code_bytes) >> 1;
	if (instruction < -1 || instruction > (s64)code_word(w, CODE_SIZE_AT))
		return PYTHON_OUTSIDE;
	problem = check_place(w, l, at, owner, instruction);
	if (problem != GO_ON)
		return problem;
	w->seen++;
	/* CPython calls frames incomplete if they have not started, or are shims (for __init__). */
	if (owner != OWNED_BY_GENERATOR && instruction < (s32)code_half(w, l->code_traceable))
		return w->rooted ? put_entry(w) : GO_ON;
	word = instruction < 0 || instruction > NO_INSTRUCTION ? NO_INSTRUCTION : instruction;
	word = word << CODE_ID_BITS | (w->rooted ? FROM_C : 0);
	if (w->head.frames >= w->limit)
		return PYTHON_TRUNCATED;
	return put_word(w, word | find_code(w, l, code));
}

/* Advances to the next frame; returns an outcome at the end, otherwise GO_ON. */
GLOBAL int python_step(void)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;
	const u8 *frame;
	u64 at;
	u32 owner;

	if (!w)
		return PYTHON_UNREADABLE;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l)
		return PYTHON_UNREADABLE;
	at = w->frame;
	if (!at)
		return !w->rooted && w->seen ? PYTHON_UNROOTED :
		       w->head.frames	     ? PYTHON_COMPLETE :
					       PYTHON_NO_FRAME;
	frame = get_frame(w, l, at);
	if (!frame)
		return PYTHON_UNREADABLE;
	w->frame = frame_word_at(frame, l->frame_previous);
	owner = frame_byte_at(frame, l->frame_owner);
	if (!(l->flags & PYTHON_IS_ENTRY) && owner >= l->entry_owner)
		return put_entry(w);
	w->rooted = l->flags & PYTHON_IS_ENTRY ? frame_byte_at(frame, l->frame_entry) : 0;
	return read_function(w, l, frame, at, owner);
}

/* Returns whether the loop was just entered: _PyCFrame is linked, but the new frame may not be. */
INLINE int is_entering(const struct python_work *w)
{
	return w->user_ip - w->process.eval_start < w->process.eval_bytes;
}

/* Reads the frames of the interrupted thread into `head` and `word`; returns an outcome. */
GLOBAL int walk_python(void)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;
	int result;

	if (!w)
		return PYTHON_UNREADABLE;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l || read_current_frame(w, l))
		return PYTHON_UNREADABLE;
	if (is_entering(w))
		return PYTHON_ENTERING;
	w->seen = w->open = w->rooted = w->top_at = w->new_codes = 0;
	w->window_at = NO_WINDOW_AT;
	w->head.frames = 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < MAX_PYTHON_FRAMES + MORE_STEPS; i++) {
		result = python_step();
		if (result != GO_ON)
			return result;
	}
	return PYTHON_TRUNCATED;
}

/*
 * Stores a process's program on the first call; returns whether the process still runs that
 * program.
 */
INLINE int same_image(struct python_process *process, u64 image)
{
	if (!process->image)
		process->image = image;
	return process->image == image;
}

/*
 * Prepares the walk; returns PYTHON_COMPLETE if the thread's state was found, otherwise the outcome
 * to report.
 */
INLINE int begin_python(struct python_work *w, struct python_process *process,
			const struct python_config *c, const struct record *record)
{
	u64 ids = bpf_get_current_pid_tgid();

	w->cpu = record->cpu;
	w->new_codes = 0;
	w->image = find_image(c, record);
	if (!w->image)
		return PYTHON_UNREADABLE;
	if (!same_image(process, w->image))
		return PYTHON_OTHER_IMAGE;
	w->process = *process;
	w->layout = process->layout;
	w->head.tag = process->tag;
	w->tgid = record->tgid;
	w->tid = ids;
	w->time_ns = record->time_ns;
	w->limit = c->max_frames & MAX_PYTHON_FRAMES;
	w->sample = (u64)(w->cpu + 1) << 48 | (w->sample + 1) << 16 >> 16;
	return find_python_thread();
}

/*
 * Appends the interrupted thread's Python frames to the record, after the other stacks; returns the
 * size of the frames in bytes, or 0. A separate function to save stack space, like collect_span.
 */
GLOBAL int collect_python_stack(u64 behind)
{
	u32 zero = 0;
	const struct python_config *c = LOOKUP(python_config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct python_work *w = get_python_work();
	struct python_process *process;
	u64 bytes;
	int result;

	if (!c || !own || !w)
		return 0;
	process = LOOKUP(python_processes, &own->record.tgid);
	if (!process)
		return 0;
	result = begin_python(w, process, c, &own->record);
	if (result == PYTHON_COMPLETE)
		result = walk_python();
	else if (result == PYTHON_OTHER_IMAGE)
		tell_process();
	count_python(w, result);
	if (result != PYTHON_COMPLETE && result != PYTHON_TRUNCATED)
		return 0;
	w->head.end = result;
	w->head.version = PYTHON_STACK_VERSION;
	bytes = sizeof(w->head) + w->head.frames * sizeof(w->word[0]);
	BOUND(bytes, PYTHON_STACK_BYTES - 8);
	BOUND(behind, STACKS_MASK);
	if (behind > STACK_BYTES + USER_STACK_BYTES ||
	    bpf_probe_read_kernel((u8 *)own->record.frames + behind, bytes, &w->head))
		return 0;
	return bytes;
}

/* Returns whether the process is registered; if so, records the current instruction. */
INLINE int begins_python(void *ctx, const struct record *record)
{
	u32 zero = 0;
	const struct python_config *c = LOOKUP(python_config, &zero);
	const struct python_process *process;
	struct python_work *w = get_python_work();

	if (!w || !c)
		return 0;
	w->thread = 0;
	if (!c->max_frames)
		return 0;
	process = LOOKUP(python_processes, &record->tgid);
	if (!process) {
		tell_process();
		return 0;
	}
	w->user_ip = 0;
	if (process->eval_bytes)
		bpf_get_stack(ctx, &w->user_ip, sizeof(w->user_ip), BPF_F_USER_STACK);
	return 1;
}
