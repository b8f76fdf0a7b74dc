// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reads the labels (runtime/pprof) of the goroutine that the interrupted thread is running, by
 * following the pointers g, g.m, m.curg and g.labels. Labels never change once they are set, and
 * the thread is stopped. User space determines the offsets (processes/goroutines.py). Layouts:
 * runtime/runtime2.go, runtime/map.go (until Go 1.23) and runtime/pprof/label.go. Included by
 * thread_context.bpf.h.
 */

struct go_string {
	u64 at;
	u64 bytes;
};

struct go_label {
	struct go_string key, value;
};

/* Per-CPU scratch memory. */
struct go_work {
	u64 behind; /* offset of the head from the start of the record's stacks */
	u64 at;	    /* offset of the next label, relative to the end of the head */
	u64 labels; /* address */
	struct go_label label;
	struct {
		u64 list, length, capacity;
	} slice;
	struct {
		u64 count;
		u8 flags, log2_buckets;
		u16 overflows;
		u32 seed;
		u64 buckets, old_buckets;
	} map;
	u8 tops[8]; /* per slot: upper bits of the key's hash; below GO_MIN_TOP if empty */
	u64 number;
};

enum {
	GO_BUCKET_LABELS = 8,
	GO_KEYS = 8, /* offset of the keys in a bucket, after `tops` */
	GO_VALUES = GO_KEYS + GO_BUCKET_LABELS * sizeof(struct go_string),
	GO_NEXT = GO_VALUES + GO_BUCKET_LABELS * sizeof(struct go_string),
	GO_BUCKET_BYTES = GO_NEXT + 8,
	GO_MIN_TOP = 5, /* minTopHash */
	GO_MAX_LOG2_BUCKETS = 3,
	GO_MAX_BUCKETS = 16, /* limit on buckets, including overflow buckets */
	GO_MAX_LABELS = 24,
	GO_STRING_MASK = 255,
	GO_MAX_KEY = 200,
	GO_MAX_VALUE = 250,
	IS_GO = 2, /* marks Go labels in `valid`: attributes have names instead of key indices */
};

SCRATCH(go_work, struct go_work);

/*
 * Copies a string from the process's memory to the record, after the head; returns 0 on success. A
 * separate function, because the verifier in Linux 5.10 loses the bounds of spilled values.
 */
GLOBAL int add_go_string(u64 at, u64 from, u64 bytes)
{
	struct go_work *work;
	struct scratch *own;
	u32 zero = 0;
	u64 behind;

	work = LOOKUP(go_work, &zero);
	own = LOOKUP(scratch, &zero);
	if (!work || !own)
		return -1;
	behind = work->behind;
	BOUND(behind, ALL_STACKS_MASK);
	BOUND(at, CONTEXT_MASK);
	BOUND(bytes, GO_STRING_MASK);
	if (behind > ALL_STACKS_BYTES || at > MAX_CONTEXT_ATTRIBUTES)
		return -1;
	return bpf_probe_read_user((u8 *)own->record.frames + behind + CONTEXT_HEAD_BYTES + at,
				   bytes, (void *)from);
}

/* Appends the label if there is space: the key and the value, each preceded by a length byte. */
GLOBAL int add_go_label(void)
{
	u64 behind, at, key, value;
	struct go_work *work;
	struct scratch *own;
	u32 zero = 0;
	u8 *to;

	work = LOOKUP(go_work, &zero);
	own = LOOKUP(scratch, &zero);
	if (!work || !own)
		return 0;
	key = work->label.key.bytes;
	value = work->label.value.bytes;
	if (!key || key > GO_MAX_KEY)
		return 0;
	if (value > GO_MAX_VALUE)
		value = GO_MAX_VALUE;
	at = work->at;
	if (at + 2 + key + value > MAX_CONTEXT_ATTRIBUTES)
		return 0;
	behind = work->behind;
	BOUND(behind, ALL_STACKS_MASK);
	BOUND(at, CONTEXT_MASK);
	if (behind > ALL_STACKS_BYTES || at > MAX_CONTEXT_ATTRIBUTES)
		return 0;
	to = (u8 *)own->record.frames + behind + CONTEXT_HEAD_BYTES + at;
	to[0] = key;
	to[1] = value;
	if (add_go_string(at + 2, work->label.key.at, key) ||
	    add_go_string(at + 2 + key, work->label.value.at, value))
		return 0; /* not resident */
	work->at = at + 2 + key + value;
	return 1;
}

/* Adds the labels from a map that never grows (Go 1.23 or earlier). */
INLINE void add_go_map(struct go_work *work)
{
	u64 map, bucket, next;

	if (READ_USER(map, work->labels) || READ_USER(work->map, map) || work->map.old_buckets ||
	    work->map.log2_buckets > GO_MAX_LOG2_BUCKETS)
		return;
	bucket = work->map.buckets;
	work->number = 0;
#pragma clang loop unroll(disable)
	for (int visit = 0; visit < GO_MAX_BUCKETS; visit++) {
		if (READ_USER(work->tops, bucket) || READ_USER(next, bucket + GO_NEXT))
			return;
#pragma clang loop unroll(disable)
		for (u32 index = 0; index < GO_BUCKET_LABELS; index++) {
			u64 skip = index * sizeof(struct go_string);

			if (work->tops[index] >= GO_MIN_TOP &&
			    !READ_USER(work->label.key, bucket + GO_KEYS + skip) &&
			    !READ_USER(work->label.value, bucket + GO_VALUES + skip))
				add_go_label();
		}
		if (next) {
			bucket = next;
			continue;
		}
		work->number++;
		if (work->number >> (work->map.log2_buckets & GO_MAX_LOG2_BUCKETS))
			return;
		bucket = work->map.buckets + work->number * GO_BUCKET_BYTES;
	}
}

/* Adds the labels from a slice (Go 1.24 or later). */
INLINE void add_go_slice(struct go_work *work)
{
	if (READ_USER(work->slice, work->labels))
		return;
#pragma clang loop unroll(disable)
	for (u64 index = 0; index < GO_MAX_LABELS; index++) {
		if (index >= work->slice.length ||
		    READ_USER(work->label, work->slice.list + index * sizeof(work->label)))
			return;
		add_go_label();
	}
}

/*
 * Writes the current goroutine's labels after the stacks; returns their size with the head, or 0.
 */
GLOBAL int collect_go_labels(u64 behind, u64 labels, u64 is_map)
{
	struct context_head *head;
	struct go_work *work;
	struct scratch *own;
	u32 zero = 0;

	work = LOOKUP(go_work, &zero);
	own = LOOKUP(scratch, &zero);
	if (!work || !own)
		return 0;
	work->behind = behind;
	work->labels = labels;
	work->at = 0;
	if (is_map)
		add_go_map(work);
	else
		add_go_slice(work);
	behind = work->behind;
	BOUND(behind, ALL_STACKS_MASK);
	if (!work->at || behind > ALL_STACKS_BYTES)
		return 0;
	head = (void *)((u8 *)own->record.frames + behind);
	head->trace_id[0] = head->trace_id[1] = head->span_id = 0;
	head->valid = IS_GO;
	head->trace_flags = 0;
	head->attributes_bytes = work->at;
	return CONTEXT_HEAD_BYTES + head->attributes_bytes;
}

/* Returns the address of the goroutine's labels; 0 if it has none. */
INLINE u64 find_go_labels(const struct context_place *place, u64 thread_pointer)
{
	u64 g, m, labels;

	if (READ_USER(g, thread_pointer + place->offset) || !g || READ_USER(m, g + place->m_at) ||
	    !m || READ_USER(g, m + place->current_at) || !g ||
	    READ_USER(labels, g + place->labels_at))
		return 0;
	return labels;
}
