// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reads the thread context that the interrupted thread publishes (OTEP 4947): a thread-local
 * pointer to a record. User space finds out where the pointer is (processes/thread_pointer.py); the
 * struct is written by bpf/thread_contexts.py; change both together. Included by sampler.bpf.c
 * after its structs. In Node.js the variable is a struct that leads to the record (v8_context.bpf.h); in
 * Go it leads to labels (go_labels.bpf.h).
 */

/* Where the threads of a process have the variable. */
struct context_place {
	u64 start_time_ns; /* of the process, and of its program's stack: it is another one otherwise */
	u64 stack_start;
	u64 offset;	/* from the thread pointer, or in the module's block */
	u64 module;	/* 0: the offset is from the thread pointer */
	u64 generation; /* of the thread's vector (DTV) from which on it knows the module */
	u64 length_at;	/* of the vector's number of modules, from its address */
	u64 first_at;	/* of the vector's first word, from there */
	u64 entry_at;	/* of the module's block, from there */
	u64 kind;	/* of the variable: enum context_kind */
	u64 wrap_at;	/* of the pointer to the record in the object that WRAPPED ones have */
	u64 vector_at;	/* of the address of the thread's vector, from the thread pointer */
	u64 m_at;	/* in Go: of g.m, of m.curg and of g.labels */
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
	FIRST_ATTRIBUTES = 100, /* bytes that are read with the head, in 128 */
	DTV_BYTES = 512, /* of a vector that are read at once */
	IS_VALID = 1,
	SLOTS = 32768, /* bits for process ids, as in thread_contexts.py */
};

#ifndef KPROFILER_BCC
#include "go_labels.bpf.h"
#endif

HASH_OF(thread_contexts, u32, struct context_place, SIZED_BY_LOADER);

ARRAY(context_slots, u64, SLOTS / 64); /* a bit for the low bits of each key of thread_contexts */

/* Whether a process may publish: others take no look-up in the hash table. */
INLINE int may_publish(u32 tgid)
{
	u32 word = tgid % SLOTS / 64;
	const u64 *bits = LOOKUP(context_slots, &word);

	return bits && *bits >> tgid % 64 & 1;
}

/*
 * Address of the pointer; 0: the thread has none yet. Only the thread itself changes its vector.
 * Modules beyond its length, or of later generations, have no block; one that is not allocated is
 * all ones in glibc. `room` is for DTV_BYTES.
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
 * Write the thread context behind the stacks of the record: its bytes, 0 if there is none. The
 * thread stands still; a head that differs at a second look is written by another thread, against
 * the protocol. A function of its own for the sake of the stack, as collect_span.
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
#ifdef KPROFILER_BCC /* reads this process only */
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
		read = 0; /* so much is not there, or not resident */
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
		bytes = 0; /* not resident, or not there: the ids are read */
	if (READ_USER(again, at) || !is_same_head(head, &again))
		return 0;
	return CONTEXT_HEAD_BYTES + bytes;
}
