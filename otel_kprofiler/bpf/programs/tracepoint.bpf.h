// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Takes samples at a raw tracepoint. Included by sampler.bpf.c.
 *
 * Before 6.10 the kernel cannot pass a value to a program attached to a raw tracepoint. The program
 * is therefore loaded once for each tracepoint, with different constants but the same maps.
 */
#pragma once

enum {
	MAX_ARGUMENTS = 6,
	NO_ARGUMENT = 255,
	SYSTEM_CALL = 1, /* index of sys_enter's argument `id` */
};

/* Written by tracepoints.py; change both together. */
struct tracepoint {
	u64 number;   /* event number, starting at 1 */
	u64 period;   /* number of events per sample */
	u64 by;	      /* enum user_frames */
	u64 python;
	u64 argument; /* index of the argument with the value; NO_ARGUMENT: the value is 1 */
	u64 pointer;  /* 0: the argument is the value; 1: it points to a struct that contains the value */
	u64 member;   /* offset of the 32-bit value in the struct */
	u64 is_order; /* whether the value is 1 << argument */
	u64 unit;     /* multiplier for the value */
	u64 calls;    /* number of the only system call to count, plus 1; 0: all */
};

const volatile struct tracepoint tracepoint SECTION(".rodata.tracepoint");

MMAP_ARRAY(traced_cpus, u64, SIZED_BY_LOADER); /* 1: events are sampled on this CPU */

/* Returns tracepoint argument `number`. The verifier requires constant offsets into the context. */
INLINE u64 read_argument(const u64 *ctx, u64 number)
{
	u64 value = 0;

#pragma clang loop unroll(full)
	for (u64 i = 0; i < MAX_ARGUMENTS; i++)
		if (i == number) {
			value = *(const volatile u64 *)&ctx[i];
			asm volatile("" : "+r"(value)); /* keeps the compiler from merging the loads */
		}
	return value;
}

/* Returns the value of an event, such as a number of bytes. */
INLINE u64 read_value(const u64 *ctx)
{
	u64 value;
	u32 member = 0;

	if (tracepoint.argument == NO_ARGUMENT)
		return 1;
	value = read_argument(ctx, tracepoint.argument);
	if (tracepoint.pointer) {
		READ_KERNEL(member, value + tracepoint.member);
		value = member;
	}
	if (tracepoint.is_order)
		value = 1ULL << (value & 63);
	return value * tracepoint.unit;
}

/* Counts an event; returns whether to sample it. Samples the last event in each period. */
INLINE int is_due(struct cpu_line *line)
{
	u64 overflows = (++line->counted + line->skipped) / tracepoint.period;

	if (overflows == line->overflows)
		return 0;
	line->missed += overflows - line->overflows - 1;
	line->overflows = overflows;
	return 1;
}

PROGRAM("raw_tp") int kprofiler_tracepoint(u64 *ctx)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), place;
	const u64 *is_traced = LOOKUP(traced_cpus, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct record *record;
	struct cpu_line *line;

	if (tracepoint.calls && read_argument(ctx, SYSTEM_CALL) + 1 != tracepoint.calls)
		return 0;
	place = tracepoint.number * EVENT_LINES + cpu;
	line = LOOKUP(cpu_lines, &place);
	if (!is_traced || !*is_traced || !options || !own || !line)
		return 0;
	if (!take_scratch(own)) {
		__sync_fetch_and_add(&line->skipped, 1);
		return 0;
	}
	if (is_due(line)) {
		record = &own->record;
		begin_record(record, line, cpu);
		record->kind = FIRST_EVENT + tracepoint.number - 1;
		record->value = read_value(ctx) * tracepoint.period;
		sample(ctx, options, record, line, tracepoint.by, tracepoint.python);
		end_record(record, line);
	}
	free_scratch(own);
	return 0;
}
