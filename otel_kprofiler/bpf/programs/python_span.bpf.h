// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Follows the interpreter's objects from the interrupted thread to its current span:
 *
 *   thread state -> contextvars.Context -> HAMT -> OpenTelemetry's Context, a dictionary
 *   -> span -> span context
 *
 * The profiled service does not report spans to the profiler. The thread is stopped, and CPython
 * with a GIL writes each reference atomically, after the object that it refers to. HAMTs and
 * OpenTelemetry contexts are immutable once they are referenced. Each object's type is checked. If
 * anything is unexpected, no span is recorded.
 *
 * CPython 3.11 to 3.14 structs: pycore_context.h, pycore_hamt.h and Python/hamt.c, pycore_dict.h
 * and Objects/dictobject.c. sdk/span_reader.py reads the same objects in Python, and
 * bpf/python_span.py writes the structs; keep the three files in sync.
 */
#pragma once

#include "python_types.bpf.h"
#include "spans.bpf.h"

enum {
	MAX_THREADS = 1024,
	THREADS_PER_CALL = 32,
	MAX_LEVELS = 8, /* levels of a HAMT: 7 for the 32 hash bits (5 each), 1 for collisions */
	MAX_EQUAL_HASHES = 8,
	MAX_PROBES = 32, /* maximum number of probes per dictionary lookup */
	MAX_LOG2_SIZE = 15, /* largest index table that is read, with two bytes per index */
	SPAN_CLASSES = 4,
};

/* Locations where instances of a class store their attributes. */
enum values_style {
	VALUES_BY_POINTER, /* 3.11: pointers to the values and the dictionary precede the object */
	VALUES_TAGGED,	   /* 3.12: a tagged word points to the values or a dictionary */
	VALUES_INLINE,	   /* 3.13: the values follow the object, unless they are marked invalid */
};

struct span_class {
	u64 type;
	u64 place; /* index of the span context's attribute in `keys` */
	u64 keys;  /* address of the key table shared by the class's instances */
};

/* SpanPath in bpf/python_span.py describes the members. */
struct span_path {
	u64 tgid; /* 0: no path */
	u64 oldest_thread;
	u64 tid_at;
	u64 context_at;
	u64 context_type;
	u64 hamt_type;
	u64 bitmap_type;
	u64 array_type;
	u64 collision_type;
	u64 variable;
	u64 variable_hash;
	u64 otel_context_type;
	u64 span_key;
	u64 span_key_hash;
	u64 labels_key;
	u64 labels_key_hash;
	u64 dict_type;
	u64 attribute;
	u64 attribute_hash;
	u64 values_style;
	struct span_class classes[SPAN_CLASSES];
};

struct thread_links {
	u64 newer; /* prev */
	u64 older; /* next */
};

struct context_object {
	u64 references, type, previous, hamt;
};

struct hamt_object {
	u64 references, type, root;
};

struct hamt_node {
	u64 references, type;
	u64 size;   /* array nodes have no size; their children begin here */
	u32 bitmap; /* only in bitmap nodes */
};

struct entry {
	u64 key, value;
};

struct dict_object {
	u64 references, type, used, version, keys, values;
};

struct dict_keys {
	u64 references;
	u8 log2_size, log2_index_bytes, kind;
	u32 version;
	u64 usable, entries;
};

enum {
	GENERAL_KEYS, /* dk_kind of a table whose entries begin with a hash */
	UNICODE_KEYS,
	SPLIT_KEYS,
	EMPTY_INDEX = -1,
	HAMT_ENTRIES_AT = 32,
	HAMT_CHILDREN_AT = 16,
	KEYS_INDICES_AT = 32,
	VALUES_POINTER_AT = -32,
	DICT_POINTER_AT = -24,
	INLINE_VALUES_AT = 16, /* sizeof(PyObject) */
	INLINE_VALUES_HEAD = 8, /* header of PyDictValues since 3.13; its fourth byte is `valid` */
};

ARRAY(span_path, struct span_path, 1);

INLINE const struct span_path *get_span_path(void)
{
	u32 zero = 0;

	return LOOKUP(span_path, &zero);
}

/* Returns whether `state` has this thread id and is in the list, where a neighbor points to it. */
INLINE int is_state_of(const struct span_path *path, u64 state, u64 tid)
{
	struct thread_links links;
	u64 id, newer = state;

	if (READ_USER(id, state + path->tid_at) || id != tid || READ_USER(links, state))
		return 0;
	if (state != path->oldest_thread && (!links.older || READ_USER(newer, links.older)))
		return 0;
	return newer == state;
}

/*
 * Advances `next_thread` to newer states, up to the state with this thread id; returns whether the
 * search is over. `next_thread` is 0 if the list ends, or cannot be read.
 */
GLOBAL int search_newer(u32 tid)
{
	const struct span_path *path = get_span_path();
	struct python_work *w = get_python_work();
	u64 state, id;

	if (!path || !w)
		return 1;
	state = w->next_thread;
	w->next_thread = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < THREADS_PER_CALL; i++) {
		if (!state || READ_USER(id, state + path->tid_at))
			return 1;
		if (id == tid)
			break;
		if (READ_USER(state, state + __builtin_offsetof(struct thread_links, newer)))
			return 1;
	}
	w->next_thread = state;
	return id == tid;
}

/*
 * Returns this thread's state from the interpreter's list, or 0 if it is not in the list. If Python
 * frames were read in this interrupt, the state is already known.
 */
GLOBAL u64 find_thread_state(u32 tid)
{
	const struct span_path *path = get_span_path();
	struct python_work *w = get_python_work();
	struct thread_state *known;
	u64 state;

	if (!path || !w)
		return 0;
	if (w->thread)
		return w->thread;
	known = LOOKUP(python_threads, &tid);
	if (known && is_state_of(path, known->address, tid))
		return known->address;
	w->next_thread = path->oldest_thread;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_THREADS / THREADS_PER_CALL && !search_newer(tid); i++)
		;
	state = w->next_thread;
	if (!state || !is_state_of(path, state, tid))
		return 0;
	w->found.image = 0; /* makes the frame walk ignore this entry */
	w->found.address = state;
	bpf_map_update_elem(&python_threads, &tid, &w->found, BPF_ANY);
	return state;
}

INLINE u32 count_bits(u32 bits)
{
	bits -= bits >> 1 & 0x55555555;
	bits = (bits & 0x33333333) + (bits >> 2 & 0x33333333);
	return ((bits + (bits >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24;
}

/*
 * Searches entries with equal hashes for OpenTelemetry's context variable; returns the variable's
 * value.
 */
INLINE u64 find_among_equals(const struct span_path *path, u64 node, u64 words)
{
	struct entry entry;

#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_EQUAL_HASHES && 2 * i < words; i++) {
		if (READ_USER(entry, node + HAMT_ENTRIES_AT + sizeof(entry) * i))
			return 0;
		if (entry.key == path->variable)
			return entry.value;
	}
	return 0;
}

/* Returns the value of OpenTelemetry's context variable in the HAMT at `node`; 0 if absent. */
GLOBAL u64 find_variable(u64 node)
{
	const struct span_path *path = get_span_path();
	struct hamt_node head;
	struct entry entry;
	u32 hash, bit;

	if (!path)
		return 0;
	hash = path->variable_hash;
#pragma clang loop unroll(disable)
	for (u32 level = 0; level < MAX_LEVELS; level++, hash >>= 5) {
		if (READ_USER(head, node))
			return 0;
		if (head.type == path->bitmap_type) {
			bit = 1u << (hash & 31);
			if (!(head.bitmap & bit) ||
			    READ_USER(entry, node + HAMT_ENTRIES_AT +
						     sizeof(entry) * count_bits(head.bitmap & (bit - 1))))
				return 0;
			if (entry.key)
				return entry.key == path->variable ? entry.value : 0;
			node = entry.value;
		} else if (head.type == path->array_type) {
			if (READ_USER(node, node + HAMT_CHILDREN_AT + 8 * (hash & 31)) || !node)
				return 0;
		} else if (head.type == path->collision_type) {
			return find_among_equals(path, node, head.size);
		} else {
			return 0;
		}
	}
	return 0;
}

/* Returns the value of a string key in a dictionary's combined table; 0 if absent. */
GLOBAL u64 find_in_dict(u64 keys, u64 key, u64 hash)
{
	u64 mask, place, wide, entries, entry_bytes;
	struct dict_keys head;
	struct entry entry;

	if (READ_USER(head, keys) || head.log2_size > MAX_LOG2_SIZE || head.kind > UNICODE_KEYS)
		return 0;
	mask = (1ull << head.log2_size) - 1;
	entries = keys + KEYS_INDICES_AT + (1ull << (head.log2_index_bytes & 31));
	entry_bytes = sizeof(entry);
	if (head.kind == GENERAL_KEYS) {
		entries += 8; /* the hash */
		entry_bytes += 8;
	}
	place = hash & mask;
	wide = head.log2_size >= 8;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_PROBES; i++) {
		s16 index; /* in small tables, the index is the low byte; the high byte is the next index */

		if (READ_USER(index, keys + KEYS_INDICES_AT + (place << wide)))
			return 0;
		if (!wide)
			index = (s8)index;
		if (index == EMPTY_INDEX)
			return 0;
		if (index >= 0 && (u64)index < head.entries) { /* negative: a deleted entry */
			if (READ_USER(entry, entries + entry_bytes * (u64)index))
				return 0;
			if (entry.key == key)
				return entry.value;
		}
		hash >>= 5;
		place = (place * 5 + hash + 1) & mask;
	}
	return 0;
}

/*
 * Returns the address of a span's span context, found in its attribute values or __dict__; 0 if not
 * found.
 */
GLOBAL u64 find_span_context(u64 span)
{
	const struct span_path *path = get_span_path();
	u64 type, place = 0, keys = 0, values = 0, dict_at, found, known = 0;
	struct dict_object dict;
	u64 values_head = 0;

	if (!path || READ_USER(type, span + TYPE_AT))
		return 0;
#pragma clang loop unroll(full)
	for (u32 i = 0; i < SPAN_CLASSES; i++) {
		const struct span_class *class = &path->classes[i];

		if (class->type == type) {
			known = 1;
			place = class->place;
			keys = class->keys;
		}
	}
	if (!known || READ_USER(dict_at, span + DICT_POINTER_AT))
		return 0;
	if (path->values_style == VALUES_BY_POINTER) {
		if (READ_USER(values, span + VALUES_POINTER_AT))
			return 0;
	} else if (path->values_style == VALUES_TAGGED) {
		if (dict_at & 1)
			values = dict_at + 1;
	} else {
		u8 head[4];

		values_head = INLINE_VALUES_HEAD;
		if (READ_USER(head, span + INLINE_VALUES_AT))
			return 0;
		if (head[3])
			values = span + INLINE_VALUES_AT;
	}
	if (!values) {
		if (READ_USER(dict, dict_at) || dict.type != path->dict_type)
			return 0;
		if (!dict.values)
			return find_in_dict(dict.keys, path->attribute, path->attribute_hash);
		if (dict.keys != keys)
			return 0;
		values = dict.values;
	}
	return READ_USER(found, values + values_head + 8 * place) ? 0 : found;
}

/* Returns the table for the thread's current OpenTelemetry context, or 0 if it has no context. */
GLOBAL u64 find_otel_context(u32 tid)
{
	const struct span_path *path = get_span_path();
	u64 state = find_thread_state(tid), at;
	struct context_object context;
	struct dict_object dict;
	struct hamt_object hamt;

	if (!path || !state || READ_USER(at, state + path->context_at))
		return 0;
	if (READ_USER(context, at) || context.type != path->context_type)
		return 0;
	if (READ_USER(hamt, context.hamt) || hamt.type != path->hamt_type)
		return 0;
	at = find_variable(hamt.root);
	if (!at || READ_USER(dict, at) || dict.type != path->otel_context_type || dict.values)
		return 0;
	return dict.keys;
}

/*
 * Returns the span context in an OpenTelemetry context's table; 0 if absent or uncertain. Not
 * a separate function: functions that call each other share 512 bytes of stack.
 */
INLINE u64 find_span_context_in(const struct span_path *path, u64 table)
{
	u64 found = find_in_dict(table, path->span_key, path->span_key_hash);

	return found ? find_span_context(found) : 0;
}

/* Returns the label set number stored in an OpenTelemetry context's dict; 0 if absent. */
INLINE u32 find_labels_in(const struct span_path *path, const struct span_layout *layout, u64 table)
{
	u64 found = find_in_dict(table, path->labels_key, path->labels_key_hash);
	struct python_int number;

	if (!found || !read_int(layout, found, layout->int_type, &number))
		return 0;
	return low_half(&number);
}
