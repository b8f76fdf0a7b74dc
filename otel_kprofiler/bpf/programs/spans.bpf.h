// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reads opentelemetry-api span contexts. spans.py writes the layout; change both together.
 */
#pragma once

#include "loaders.bpf.h"

enum {
	MAX_DIGITS = 5, /* number of digits in a 128-bit Python int */
};

/*
 * Addresses of types in the service's interpreter (CPython), and offsets in objects of these
 * types. See SpanLayout in spans.py.
 */
struct span_layout {
	u64 span_context_type;
	u64 int_type;
	u64 flags_type;
	u64 false_at;
	u64 items_at;
	u64 size_shift;
	u64 negative_bit;
	u64 unsampled;
};

/* A Python integer, without the reference count at the start of every object. */
struct python_int {
	u64 type;
	u64 size; /* number of digits, shifted left by size_shift */
	u32 digits[MAX_DIGITS + 1]; /* 30 bits each, lowest first */
};

struct span {
	u64 trace_id[2]; /* high half, low half */
	u64 span_id;	 /* zero: no span */
};

#define TYPE_AT 8

/*
 * Reads a non-negative int whose type is exactly `type`; returns 0 on failure, or if the int has
 * more than MAX_DIGITS digits.
 */
INLINE int read_int(const struct span_layout *layout, u64 object, u64 type,
		    struct python_int *number)
{
	u64 digits;

	if (READ_USER(*number, object + TYPE_AT) || number->type != type)
		return 0;
	digits = number->size >> layout->size_shift;
	if (digits > MAX_DIGITS || number->size & layout->negative_bit)
		return 0;
#pragma clang loop unroll(full)
	for (u32 i = 0; i < MAX_DIGITS; i++)
		if (i >= digits)
			number->digits[i] = 0; /* not a digit: past the end of the object */
	return 1;
}

INLINE u64 low_half(const struct python_int *number)
{
	return number->digits[0] | (u64)number->digits[1] << 30 | (u64)number->digits[2] << 60;
}

/* Reads a span context's ids into `span`; skips remote and, by default, unsampled spans. */
INLINE void read_span_context(const struct span_layout *layout, u64 object, struct span *span)
{
	u64 type, items[4]; /* trace id, span id, is_remote, trace flags */
	struct python_int number;

	if (READ_USER(type, object + TYPE_AT) || type != layout->span_context_type ||
	    READ_USER(items, object + layout->items_at) || items[2] != layout->false_at)
		return;
	if (!read_int(layout, items[3], layout->flags_type, &number) ||
	    !(number.digits[0] & 1 || layout->unsampled))
		return;
	if (!read_int(layout, items[0], layout->int_type, &number))
		return;
	span->trace_id[0] = number.digits[2] >> 4 | (u64)number.digits[3] << 26 |
			    (u64)number.digits[4] << 56;
	span->trace_id[1] = low_half(&number);
	if (!read_int(layout, items[1], layout->int_type, &number))
		return;
	span->span_id = low_half(&number);
}
