// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A variant of the sampler whose records contain a mark instead of a span. The mark is the number
 * at the interrupted thread's address in `marks`.
 */
#include "loaders.bpf.h"

enum { MAX_MARKS = 1024 };

HASH(marks, u64, MAX_MARKS); /* addresses of the marks, by thread id */

#undef RING_OUTPUT
#define RING_OUTPUT(map, data, size, flags) \
	({ \
		MARK_##map(data); \
		bpf_ringbuf_output(&map, data, size, flags); \
	})
#define MARK_ring(record) \
	do { \
		u64 *mark = LOOKUP(marks, &(record)->tid), stored = 0; \
\
		if (mark && !READ_USER(stored, *mark)) { \
			(record)->span.trace_id[0] = 1ULL << 63 | stored; \
			(record)->span.span_id = 1; \
		} \
	} while (0)
#define MARK_file_requests(record)
#define MARK_python_codes(record)

#include "sampler.bpf.c"
