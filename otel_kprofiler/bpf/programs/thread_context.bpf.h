// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reads the thread context of the interrupted thread (OTEP 4947), which is a record that a
 * thread-local variable points to. User space locates the pointer (processes/thread_pointer.py),
 * and bpf/thread_contexts.py writes the struct; change both together. Included by sampler.bpf.c
 * after its struct definitions. In Node.js, the thread-local variable is a struct that leads to the
 * record (v8_context.bpf.h). In Go programs, the variable leads to the goroutine's labels
 * (go_labels.bpf.h).
 */

/* Location of the context variable in a process's threads. */
struct context_place {
	u64 start_time_ns; /* start of the process; stack_start: start address of its main stack */
	u64 stack_start;
	u64 offset;	/* offset from the thread pointer, or in the module's TLS block */
	u64 module;	/* 0: the offset is from the thread pointer */
	u64 generation; /* first generation of the thread's vector (DTV) that contains the module */
	u64 length_at;	/* offset of the module count from the vector's address */
	u64 first_at;	/* offset of the first entry from the vector's address */
	u64 entry_at;	/* offset of the module's DTV entry from the module count */
	u64 kind;	/* type of the variable: enum context_kind */
	u64 wrap_at;	/* offset of the record pointer in the object, for WRAPPED kinds */
	u64 vector_at;	/* offset of the vector's address from the thread pointer */
	u64 m_at;	/* in Go: offsets of g.m, m.curg and g.labels */
	u64 current_at;
	u64 labels_at;
};

enum context_kind { POINTER, IN_V8, WRAPPED_IN_V8, GO_LABELS, GO_LABEL_MAP };

#include "v8_context.bpf.h"

struct context_head {
	u64 trace_id[2];
	u64 span_id;
	u8 valid;
	u8 trace_flags;
	u16 attributes_bytes;
} __attribute__((packed));

enum {
	CONTEXT_HEAD_BYTES = sizeof(struct context_head),
	FIRST_ATTRIBUTES = 100, /* bytes of attributes read together with the head (128 in total) */
	DTV_BYTES = 512, /* bytes of a DTV that are read at once */
	IS_VALID = 1,
	SLOTS = 32768, /* number of bits in `context_slots`; must match thread_contexts.py */
};

#ifndef KPROFILER_BCC
#include "go_labels.bpf.h"
#endif

HASH_OF(thread_contexts, u32, struct context_place, SIZED_BY_LOADER);

ARRAY(context_slots, u64, SLOTS / 64); /* bit N: a process with tgid % SLOTS == N may publish contexts */

/* Returns whether a process may publish contexts; if not, the hash lookup can be skipped. */
INLINE int may_publish(u32 tgid)
{
	u32 word = tgid % SLOTS / 64;
	const u64 *bits = LOOKUP(context_slots, &word);

	return bits && *bits >> tgid % 64 & 1;
}

/*
 * Returns the address of the pointer, or 0 if the pointer is not allocated yet. Only the thread
 * itself changes its vector (DTV). If the vector is too short or its generation is too old, the
 * module's TLS block is not allocated. In glibc, the address of an unallocated block is all ones.
 * `room` has DTV_BYTES bytes.
 */
INLINE u64 find_context_pointer(const struct context_place *place, u64 thread_pointer, u8 *room)
{
	u64 vector, bytes, length, generation, block;

	if (!place->module)
		return thread_pointer + place->offset;
	if (READ_USER(vector, thread_pointer + place->vector_at))
		return 0;
	vector += place->length_at;
	bytes = place->entry_at + sizeof(block);
	if (bytes <= DTV_BYTES) {
		u64 entry_at = place->entry_at, first_at = place->first_at;

		BOUND(bytes, 2 * DTV_BYTES - 1);
		BOUND(entry_at, DTV_BYTES - 1);
		BOUND(first_at, DTV_BYTES - 1);
		if (bpf_probe_read_user(room, bytes, (void *)vector))
			return 0;
		length = *(u64 *)room;
		generation = *(u64 *)(room + first_at);
		block = *(u64 *)(room + entry_at);
	} else if (READ_USER(length, vector) || READ_USER(generation, vector + place->first_at) ||
		   READ_USER(block, vector + place->entry_at)) {
		return 0;
	}
	if (length < place->module || generation < place->generation || !block || block == -1ULL)
		return 0;
	return block + place->offset;
}

INLINE int is_same_head(const struct context_head *one, const struct context_head *other)
{
	return one->trace_id[0] == other->trace_id[0] && one->trace_id[1] == other->trace_id[1] &&
	       one->span_id == other->span_id && one->valid == other->valid &&
	       one->trace_flags == other->trace_flags &&
	       one->attributes_bytes == other->attributes_bytes;
}

/*
 * Writes the thread context after the record's stacks; returns its size in bytes, or 0. The
 * thread is stopped, so if a second read returns a different head, another thread is writing it, in
 * violation of the protocol. A separate function to save stack space, like collect_span.
 */
GLOBAL int collect_thread_context(u64 behind)
{
	u64 thread_pointer = 0, pointer_at, at = 0, bytes, read = FIRST_ATTRIBUTES;
	const struct context_place *place;
	const struct config *options;
	struct context_head *head, again;
	struct scratch *own;
	u32 zero = 0;

	options = LOOKUP(config, &zero);
	own = LOOKUP(scratch, &zero);
	if (!options || !own)
		return 0;
	place = LOOKUP(thread_contexts, &own->record.tgid);
	if (!place || place->start_time_ns != own->record.start_time_ns ||
	    place->stack_start != own->record.stack_start ||
	    READ_KERNEL(thread_pointer, bpf_get_current_task() + options->thread_pointer))
		return 0;
	BOUND(behind, ALL_STACKS_MASK);
	if (behind > ALL_STACKS_BYTES)
		return 0;
	if (place->kind >= GO_LABELS) {
#ifdef KPROFILER_BCC /* with bcc, only the profiler's process has contexts */
		return 0;
#else
		at = find_go_labels(place, thread_pointer);
		return at ? collect_go_labels(behind, at, place->kind == GO_LABEL_MAP) : 0;
#endif
	}
	head = (void *)((u8 *)own->record.frames + behind);
	pointer_at = find_context_pointer(place, thread_pointer, (u8 *)head);
	if (!pointer_at)
		return 0;
	if (place->kind != POINTER)
		at = find_v8_record(place, pointer_at, (void *)head);
	else if (READ_USER(at, pointer_at))
		return 0;
	if (!at)
		return 0;
	if (bpf_probe_read_user(head, CONTEXT_HEAD_BYTES + FIRST_ATTRIBUTES, (void *)at)) {
		read = 0; /* part of the context is not resident */
		if (READ_USER(*head, at))
			return 0;
	}
	if (head->valid != IS_VALID)
		return 0;
	bytes = head->attributes_bytes;
	if (bytes > MAX_CONTEXT_ATTRIBUTES)
		bytes = MAX_CONTEXT_ATTRIBUTES;
	BOUND(bytes, CONTEXT_MASK);
	if (bytes > read &&
	    bpf_probe_read_user(head + 1, bytes, (void *)(at + CONTEXT_HEAD_BYTES)))
		bytes = 0; /* the attributes are not resident, but the ids are */
	if (READ_USER(again, at) || !is_same_head(head, &again))
		return 0;
	return CONTEXT_HEAD_BYTES + bytes;
}
