// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs the sampler on perf events other than cpu-clock. Included by sampler.bpf.c.
 *
 * Before 5.15, the kernel passes no cookie to a perf event program. Therefore, the event's number
 * is in perf_event_attr.wakeup_events, which only affects readers of a perf ring. If no events are
 * configured, constants in event_layout let the verifier eliminate this code as dead code.
 */
#pragma once

/* Offsets for reading an event's attributes, and other constants. */
struct event_layout {
	u64 in_context; /* offset of bpf_perf_event_data_kern.event; 0: all events are cpu-clock */
	u64 attributes; /* offset of perf_event.attr */
	u64 cpus;	/* number of cpu_lines per event */
	u64 may_nest;	/* whether a program may interrupt another on the same CPU: see take_scratch() */
};

/* Part of struct perf_event_attr, from its sample_period member on. */
struct event_attributes {
	u64 period; /* period, or sampling rate if EVENT_FREQUENCY is set */
	u64 sample_type;
	u64 read_format;
	u64 flags;
	u32 number; /* wakeup_events: 0 for cpu-clock, otherwise the event's number */
	u32 unused;
};

/* struct bpf_perf_event_value */
struct event_count {
	u64 count;
	u64 enabled_ns;
	u64 running_ns;
};

enum {
	SAMPLE_PERIOD_OFFSET = 16, /* offset of sample_period in struct perf_event_attr */
	EVENT_FREQUENCY = 1 << 10, /* perf_event_attr.freq */
	FIRST_EVENT = 16,	   /* sample kind of event 1 */
	NO_EVENT = 0xffffffff,
};

#ifdef KPROFILER_BCC

#define FOLLOWS_EVENTS 0
#define MAY_NEST 0
#define EVENT_LINES 0
#define find_event(ctx, to) 0
#define count_event(ctx, line, record, number) (void)0

#else

const volatile struct event_layout event_layout SECTION(".rodata.events");

#define FOLLOWS_EVENTS event_layout.in_context
#define MAY_NEST event_layout.may_nest
#define EVENT_LINES event_layout.cpus

/* Returns the number of the event that triggered the program; copies the event's attributes. */
INLINE u32 find_event(const void *ctx, struct event_attributes *to)
{
	u64 event = 0;

	if (!FOLLOWS_EVENTS)
		return 0;
	if (READ_KERNEL(event, (const u8 *)ctx + event_layout.in_context) ||
	    bpf_probe_read_kernel(to, sizeof(*to),
				  (void *)(event + event_layout.attributes + SAMPLE_PERIOD_OFFSET)))
		return NO_EVENT;
	return to->number;
}

/*
 * Sets a sample's value: the number of events that it represents. The value is the period if the
 * event has a fixed period; overflows that did not run the program are counted as missed. If the
 * event has a rate, its period varies, and the value is the number of events since the program last
 * ran on this CPU.
 */
INLINE void count_event(void *ctx, struct cpu_line *line, struct record *record, u32 number)
{
	/* The attributes are in scratch memory, where the stacks are written later. */
	const struct event_attributes *attributes = (void *)record->frames;
	u64 period = attributes->period, by_rate = attributes->flags & EVENT_FREQUENCY;
	struct event_count *now = (void *)record->frames;
	u64 overflows;

	record->kind = FIRST_EVENT + number - 1;
	record->value = by_rate ? 1 : period;
	if (!period || bpf_perf_prog_read_value(ctx, now, sizeof(*now)))
		return;
	if (now->count < line->counted) /* a new event, opened after this CPU was offline */
		line->counted = line->overflows = 0;
	if (by_rate) {
		record->value = now->count - line->counted;
	} else {
		overflows = now->count / period;
		if (overflows > line->overflows)
			line->missed += overflows - line->overflows - 1;
		line->overflows = overflows;
	}
	line->counted = now->count;
}

#endif
