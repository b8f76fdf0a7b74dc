// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds the thread context of the interrupted thread in V8's heap, where Node.js keeps it: the
 * value of the writer's AsyncLocalStorage in the current AsyncContextFrame, which is a JavaScript
 * Map. The thread is stopped. While the garbage collector is moving objects, a lookup may miss the
 * key, but never returns the value of another key. Layouts: struct otel_thread_ctx_nodejs_v1_t in
 * pprof-nodejs; js-collection.h, ordered-hash-table.h and js-objects.h in V8. Node.js does not use
 * V8's pointer compression. Included by thread_context.bpf.h.
 */

enum {
	V8_TAG = 1,	 /* tag bit in addresses of heap objects */
	V8_SMI_SHIFT = 32, /* a small integer (Smi) is stored in the upper 32 bits */
	V8_MAP_TABLE = 24, /* JSCollection::kTableOffset */
	V8_TABLE_HEAD = 16, /* map and length of a FixedArray */
	V8_TABLE_WORDS = 3, /* counts of elements, deleted elements and buckets; buckets follow */
	V8_ENTRY_WORDS = 3, /* key, value, next entry */
	V8_FIELDS = 24,	 /* offset of an object's internal fields, or of the preceding word (V8 13) */
	V8_MAX_BUCKETS = 1 << 16,
	V8_MAX_CHAIN = 16, /* maximum number of entries examined per bucket; the average is two */
};

/* Scratch memory. */
struct v8_reading {
	struct {
		u64 frame_at; /* 0: this thread has never had a context */
		u64 storage_at;
		u32 hash; /* identity hash of the AsyncLocalStorage object */
		u32 reserved;
		u64 undefined;
	} writer;
	struct {
		u64 elements, deleted, buckets;
	} table;
	struct {
		u64 key, value, next;
	} entry;
	u64 fields[2];
};

/* Returns the address of the record, or 0 if the thread has no record. `room` is scratch memory. */
INLINE u64 find_v8_record(const struct context_place *place, u64 variable_at,
			  struct v8_reading *room)
{
	u64 frame, storage, table, words, buckets, next, record;

	if (READ_USER(room->writer, variable_at) || !room->writer.frame_at ||
	    READ_USER(frame, room->writer.frame_at) || !(frame & V8_TAG) ||
	    frame == room->writer.undefined || READ_USER(storage, room->writer.storage_at) ||
	    READ_USER(table, frame - V8_TAG + V8_MAP_TABLE) || !(table & V8_TAG))
		return 0;
	words = table - V8_TAG + V8_TABLE_HEAD;
	if (READ_USER(room->table, words))
		return 0;
	words += V8_TABLE_WORDS * sizeof(words);
	buckets = room->table.buckets >> V8_SMI_SHIFT;
	if (buckets - 1 >= V8_MAX_BUCKETS || buckets & (buckets - 1) ||
	    READ_USER(next, words + (room->writer.hash & (buckets - 1)) * sizeof(next)))
		return 0;
	words += buckets * sizeof(words);
	room->entry.key = 0;
	for (int count = 0; count < V8_MAX_CHAIN && room->entry.key != storage; count++) {
		next >>= V8_SMI_SHIFT;
		if (next >> 31 || /* -1 ends the chain */
		    READ_USER(room->entry, words + next * sizeof(room->entry)))
			return 0;
		next = room->entry.next;
	}
	if (room->entry.key != storage || room->entry.value == room->writer.undefined ||
	    !(room->entry.value & V8_TAG) ||
	    READ_USER(room->fields, room->entry.value - V8_TAG + V8_FIELDS))
		return 0;
	record = room->fields[0] ?: room->fields[1];
	if (record & V8_TAG)
		return 0;
	if (place->kind == WRAPPED_IN_V8 && READ_USER(record, record + place->wrap_at))
		return 0;
	return record;
}
