// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Follows threads off the CPU: how long, in which state. Included by sampler.bpf.c after its own
 * programs.
 *
 * sched_switch runs with interrupts off and the run queue locked: nothing here waits, and no
 * sampling interrupt comes between, so that the scratch memory of the samples can be used.
 */

#include "wait_types.bpf.h"

/* The state in which a task leaves its CPU. */
INLINE u32 find_wait_state(u64 state, int preempted)
{
	if (preempted || !state)
		return RUNNABLE;
	if (state & (TASK_STOPPED | TASK_TRACED))
		return STOPPED;
	if (state & (TASK_NOLOAD | TASK_PARKED))
		return IDLE_WAIT;
	if (state & (TASK_UNINTERRUPTIBLE | TASK_RTLOCK_WAIT | TASK_FROZEN))
		return UNINTERRUPTIBLE;
	return INTERRUPTIBLE;
}

/* Whether the current process is to be followed; writes its ids into the record. */
INLINE int is_followed(const struct config *options, struct record *record)
{
	u64 flags = options->flags, ids = bpf_get_current_pid_tgid();
	struct namespace_ids inner = {};
	int in_namespace = 1;

	record->tgid = ids >> 32;
	record->tid = ids;
	if (flags & NAMESPACE) {
		in_namespace = !bpf_get_ns_current_pid_tgid(options->namespace_device,
							    options->namespace_inode, &inner,
							    sizeof(inner));
		if (in_namespace) {
			record->tgid = inner.tgid;
			record->tid = inner.pid;
		}
	}
	return is_wanted(options, record, in_namespace);
}

INLINE int is_too_young(const struct config *options, u64 start_time_ns)
{
	return options->min_age_ns && start_time_ns &&
	       bpf_ktime_get_boot_ns() - start_time_ns < options->min_age_ns;
}

/* Enter the current thread into `threads`; a function of its own for the sake of the stack. */
GLOBAL int add_thread(u64 now)
{
	u64 task = bpf_get_current_task(), ids = bpf_get_current_pid_tgid();
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct thread *thread = LOOKUP(new_thread, &zero);

	if (!line || !options || !own || !thread)
		return 0;
	if (!(options->flags & WAIT_FILTERS))
		is_followed(options, &own->record); /* for its ids */
	thread->id = ids << 32 | (u32)(now >> 10);
	thread->task = task;
	thread->start_time_ns = start_time(options);
	thread->tgid = own->record.tgid;
	thread->tid = own->record.tid;
	thread->initial_tid = ids;
	if (UPDATE(threads, &task, thread))
		line->no_room++;
	return 0;
}

/* The thread has ended: its sums go to user space. */
GLOBAL int remove_thread(u64 task)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct thread *thread = LOOKUP(threads, &task);
	struct record *record;

	if (!line || !options || !own || !thread)
		return 0;
	record = &own->record;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->kind = OFF_CPU;
	record->phase = THREAD_ENDED;
	record->tgid = thread->tgid;
	record->tid = thread->tid;
	if (!bpf_probe_read_kernel(record->frames, sizeof(*thread), thread) &&
	    RING_OUTPUT(ring, record, HEADER_BYTES + sizeof(*thread), find_wakeup(options)))
		line->lost++;
	bpf_map_delete_elem(&threads, &task);
	return 0;
}

/* The current thread leaves its CPU. */
INLINE void leave(const struct wait_config *c, u64 task, u64 now, u64 state, int preempted)
{
	struct thread *thread = LOOKUP(threads, &task);
	u32 zero = 0, tid = bpf_get_current_pid_tgid();
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);

	if (!tid || !options || !own)
		return;
	if (thread && (thread->initial_tid != tid || state & TASK_DEAD)) {
		remove_thread(task);
		thread = 0;
	}
	if (state & TASK_DEAD)
		return;
	if (options->flags & WAIT_FILTERS && !is_followed(options, &own->record)) {
		if (thread)
			thread->off_since_ns = 0;
		return;
	}
	if (!thread) {
		add_thread(now);
		thread = LOOKUP(threads, &task);
		if (!thread)
			return;
	}
	if (is_too_young(options, thread->start_time_ns))
		return;
	thread->epoch = c->epoch;
	thread->state = find_wait_state(state, preempted);
	/* It was woken between the decision to sleep and now. */
	thread->woken_ns = thread->woken_ns && thread->state != RUNNABLE ? now : 0;
	thread->off_since_ns = now;
}

/* A thread came to a CPU. */
INLINE void arrive(const struct wait_config *c, struct thread *thread, u64 now)
{
	u64 since, until;

	if (!thread->off_since_ns)
		return;
	since = thread->off_since_ns;
	if (thread->epoch != c->epoch) {
		thread->off_since_ns = 0; /* it may have run meanwhile */
		return;
	}
	if (now < since)
		now = since;
	until = thread->state == RUNNABLE ? since : thread->woken_ns;
	if (until - since > now - since)
		until = now; /* nobody told of its wake-up */
	thread->total_ns[RUNNABLE] += now - until;
	thread->total_ns[thread->state < WAIT_STATES ? thread->state : 0] += until - since;
	thread->waits++;
	thread->woken_ns = 0;
	thread->off_since_ns = 0;
}

/*
 * The tracepoint tells the state since 5.18, at this place since 5.19; before, a waker on another
 * CPU may have changed it already.
 */
INLINE u64 read_task_state(const struct wait_config *c, u64 *ctx, u64 task)
{
	u32 state = 0;

	if (LINUX_KERNEL_VERSION >= (5 << 16 | 19 << 8))
		return (u32)ctx[3];
	READ_KERNEL(state, task + c->state_offset);
	return state;
}

/*
 * The kernel does not tell every switch (a few of a thousand, measured on 6.18): the task that
 * leaves is not the one that came last. When it came is not known, nor when the other one left: the
 * waits end, and begin, so that none is too long.
 */
GLOBAL int repair(u64 task, u64 now)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), state = 0;
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct thread *thread;
	u64 other;

	if (!line || !c)
		return 0;
	line->missed++;
	thread = LOOKUP(threads, &task);
	if (thread)
		arrive(c, thread, thread->woken_ns ? thread->woken_ns : line->switched_ns);
	other = line->task;
	thread = LOOKUP(threads, &other);
	if (!thread || thread->off_since_ns || thread->cpu != cpu ||
	    READ_KERNEL(state, other + c->state_offset) || state & TASK_DEAD)
		return 0;
	thread->epoch = c->epoch;
	thread->state = find_wait_state(state, 0);
	thread->off_since_ns = now;
	return 0;
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch(u64 *ctx)
{
	u64 now = bpf_ktime_get_ns(), task = bpf_get_current_task(), next = ctx[2];
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct thread *thread;

	if (!line || !c || !c->epoch)
		return 0;
	if (line->task != task && line->task && line->epoch == c->epoch)
		repair(task, now);
	leave(c, task, now, read_task_state(c, ctx, task), (u8)ctx[0]);
	line->epoch = c->epoch;
	line->task = next;
	line->switched_ns = now;
	thread = LOOKUP(threads, &next);
	if (thread) {
		arrive(c, thread, now);
		thread->cpu = cpu;
	}
	return 0;
}

/*
 * From now on the thread wants a CPU. One that is still on its own counts if it has left the run
 * queue: sched_switch will come.
 */
PROGRAM("tp_btf/sched_waking") int kprofiler_waking(u64 *ctx)
{
	u64 task = ctx[0];
	struct thread *thread = LOOKUP(threads, &task);
	const struct wait_config *c;
	u32 zero = 0, on_rq = 1;

	if (!thread || thread->woken_ns)
		return 0;
	if (!thread->off_since_ns) {
		c = LOOKUP(wait_config, &zero);
		if (!c || READ_KERNEL(on_rq, thread->task + c->on_rq_offset) || on_rq)
			return 0;
	}
	thread->woken_ns = bpf_ktime_get_ns();
	return 0;
}
