// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Assigns ids to CPython code objects, and sends a description of each object to user space when
 * the object is first seen. The frames of an interrupted thread keep its code objects alive.
 */
#pragma once

#include "python_types.bpf.h"

/* Offsets from the start of an object, which are the same in all supported versions. */
enum {
	TYPE_WORD = 1,
	CODE_SIZE_AT = 16, /* code units */
	STRING_LENGTH_AT = 16, /* length, followed by hash and state */
	TABLE_SIZE_AT = 16, /* size in bytes, followed by the hash and the content */
	TABLE_CONTENT_AT = 32,
};

#define SPREAD 0x9e3779b97f4a7c15ULL

INLINE u64 code_word(const struct python_work *w, u64 at)
{
	BOUND(at, CODE_BYTES - 8);
	return *(const u64 *)((const u8 *)w->code + at);
}

INLINE u32 code_half(const struct python_work *w, u64 at)
{
	BOUND(at, CODE_BYTES - 4);
	return *(const u32 *)((const u8 *)w->code + at);
}

/* Copies a candidate code object without its instructions; returns whether it is a code object. */
INLINE int read_code(struct python_work *w, const struct python_layout *l, u64 code)
{
	u64 bytes = l->code_bytes;

	BOUND(bytes, CODE_BYTES - 1);
	return !bpf_probe_read_user(w->code, bytes, (void *)code) &&
	       w->code[TYPE_WORD] == w->process.code_type;
}

/* Returns a checksum to distinguish the copied code object from other code at its address. */
INLINE u64 code_check(const struct python_work *w, const struct python_layout *l)
{
	u64 name = code_word(w, l->code_name), table = code_word(w, l->code_table);
	u64 sum = mix(mix(code_word(w, l->code_file), name), table);
	u64 content[4] = {};
	u32 version = l->code_version ? code_half(w, l->code_version) : 0;

	sum = mix(sum, code_word(w, CODE_SIZE_AT) << 32 | code_half(w, l->code_first_line));
	if (version && !w->several) /* versions are unique until CPython runs out of numbers */
		return mix(sum, version);
	if (!bpf_probe_read_user(content, 16, (void *)(name + STRING_LENGTH_AT)))
		sum = mix(mix(sum, content[0]), content[1]);
	if (!bpf_probe_read_user(content, 32, (void *)(table + TABLE_SIZE_AT)))
		sum = mix(mix(mix(sum, content[0]), content[2]), content[3]);
	return sum;
}

/* Assigns an id to a new code object; returns 0 if the code cannot be described now. */
INLINE u64 add_code(struct python_work *w, u64 check)
{
	u64 at = w->new_codes, id = w->next_id + 1;

	if (at >= MAX_NEW_CODES || id >> CODE_COUNTER_BITS || w->cpu >> 12) {
		count_python(w, CODE_TOO_MANY);
		return 0;
	}
	BOUND(at, MAX_NEW_CODES - 1);
	w->next_id = id;
	w->new_codes = at + 1;
	id |= (u64)(w->cpu + 1) << CODE_COUNTER_BITS;
	w->new_code[at].address = w->key.address;
	w->new_code[at].check = check;
	w->new_code[at].id = id;
	w->state.check = check ^ id * SPREAD;
	w->state.id = id;
	w->state.pending = w->sample;
	bpf_map_update_elem(&codes, &w->key, &w->state, 0);
	return id;
}

/* Returns the id of the code object copied from an address; 0 if it is not described. */
INLINE u64 find_code(struct python_work *w, const struct python_layout *l, u64 code)
{
	u64 check = code_check(w, l), id, pending;
	const struct code_state *known;

	w->key.image = w->image;
	w->key.address = code;
	known = LOOKUP(codes, &w->key);
	if (known) {
		id = *(volatile const u64 *)&known->id;
		pending = known->pending;
		/* A description written by another CPU may arrive too late for this sample. */
		if (known->check == (check ^ id * SPREAD) && (!pending || pending == w->sample))
			return id;
	}
	return add_code(w, check);
}

/* Copies a string's characters to `to`; returns the number of bytes copied, or -1. */
INLINE s64 copy_string(const struct python_layout *l, u64 object, u8 *to, u8 *width)
{
	u64 head[3], bytes, at; /* head: length, hash, state */
	u32 state, shift = l->string_ascii_shift & 31;

	if (READ_USER(head, object + STRING_LENGTH_AT))
		return -1;
	state = head[2];
	*width = state >> (l->string_kind_shift & 31) & 7;
	if (!*width || !(state >> (shift - 1 & 31) & 1))
		return -1; /* the string's characters are stored elsewhere */
	at = state >> shift & 1 ? l->string_ascii : l->string_other;
	bytes = head[0] < MAX_NAME_BYTES ? head[0] * *width : MAX_NAME_BYTES;
	if (bytes > MAX_NAME_BYTES)
		bytes = MAX_NAME_BYTES;
	BOUND(bytes, 0x1ff);
	return bpf_probe_read_user(to, bytes, (void *)(object + at)) ? -1 : (s64)bytes;
}

/* Writes the next chunk of a line table to `python_codes`; returns 0 on success. */
GLOBAL int send_piece(u64 from, u64 bytes)
{
	struct python_work *w = get_python_work();
	struct code_piece *piece;

	if (!w)
		return CODE_UNREADABLE;
	piece = &w->piece;
	piece->id = w->description.id;
	piece->kind = CODE_PIECE;
	if (bytes > TABLE_PIECE_BYTES)
		bytes = TABLE_PIECE_BYTES;
	piece->bytes = bytes;
	BOUND(bytes, 2 * TABLE_PIECE_BYTES - 1);
	if (bytes > TABLE_PIECE_BYTES || bpf_probe_read_user(piece->data, bytes, (void *)from))
		return CODE_UNREADABLE;
	if (RING_OUTPUT(python_codes, piece, sizeof(*piece) - TABLE_PIECE_BYTES + bytes,
			BPF_RB_NO_WAKEUP))
		return CODE_RING_FULL;
	return 0;
}

/* Writes a line table to `python_codes` in chunks; returns 0 on success. */
INLINE int send_table(u64 table, u64 size)
{
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_TABLE_PIECES; i++) {
		u64 at = i * TABLE_PIECE_BYTES;
		int problem;

		if (at >= size)
			break;
		problem = send_piece(table + TABLE_CONTENT_AT + at, size - at);
		if (problem)
			return problem;
	}
	return 0;
}

/* Writes a description of the copied code object to `python_codes`; returns a CODE_* outcome. */
INLINE int send_code(struct python_work *w, const struct python_layout *l)
{
	struct code_description *d = &w->description;
	u64 table = code_word(w, l->code_table), size, file_bytes;
	int problem, outcome = CODE_DESCRIBED;
	s64 bytes;

	d->kind = CODE_DESCRIPTION;
	d->tgid = w->tgid;
	d->image = w->image;
	d->first_line = code_half(w, l->code_first_line);
	d->first_traceable = code_half(w, l->code_traceable);
	bytes = copy_string(l, code_word(w, l->code_file), d->text, &d->file_width);
	if (bytes < 0)
		return CODE_UNREADABLE;
	d->file_bytes = file_bytes = bytes;
	BOUND(file_bytes, 0x1ff);
	bytes = copy_string(l, code_word(w, l->code_name), d->text + file_bytes, &d->name_width);
	if (bytes < 0 || READ_USER(size, table + TABLE_SIZE_AT))
		return CODE_UNREADABLE;
	d->name_bytes = bytes;
	if (size > MAX_TABLE_PIECES * TABLE_PIECE_BYTES) {
		size = 0;
		outcome = CODE_NO_TABLE;
	}
	if (w->new_bytes && w->new_bytes + size > MAX_NEW_BYTES)
		return CODE_TOO_MANY;
	w->new_bytes += size + 1;
	d->table_bytes = size;
	problem = send_table(table, size);
	if (problem)
		return problem;
	BOUND(bytes, 0x1ff);
	if (RING_OUTPUT(python_codes, d, sizeof(*d) - sizeof(d->text) + file_bytes + bytes,
			BPF_RB_NO_WAKEUP))
		return CODE_RING_FULL;
	return outcome;
}

/* Describes a code object that was first seen in this sample; returns a CODE_* outcome. */
GLOBAL int describe_code(u32 index)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;
	const struct new_code *code;
	int outcome;

	if (!w)
		return CODE_UNREADABLE;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l)
		return CODE_UNREADABLE;
	code = &w->new_code[index & (MAX_NEW_CODES - 1)];
	w->key.image = w->image;
	w->key.address = w->description.address = code->address;
	w->description.id = code->id;
	outcome = read_code(w, l, code->address) ? send_code(w, l) : CODE_UNREADABLE;
	if (outcome == CODE_DESCRIBED || outcome == CODE_NO_TABLE) {
		w->state.check = code->check ^ code->id * SPREAD;
		w->state.id = code->id;
		w->state.pending = 0;
		bpf_map_update_elem(&codes, &w->key, &w->state, 0);
	}
	count_python(w, outcome);
	return outcome;
}

/*
 * Writes descriptions of the code objects first seen in this CPU's sample. The sample must already
 * be in the ring.
 */
INLINE void describe_codes(void)
{
	struct python_work *w = get_python_work();

	if (!w)
		return;
	w->new_bytes = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_NEW_CODES && i < w->new_codes; i++)
		describe_code(i);
}
