// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Follows threads off the CPU: how long, in which state. Included by sampler.bpf.c after its own
 * programs.
 *
 * sched_switch runs with interrupts off and the run queue locked: nothing here waits, and no
 * sampling interrupt comes between, so that the scratch memory of the samples can be used.
 */

#include "wait_types.bpf.h"

SCRATCH(late_begin, struct record);

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
	int in_namespace;

	if (!line || !options || !own || !thread)
		return 0;
	is_followed(options, &own->record, &in_namespace); /* for its ids */
	thread->in_namespace = in_namespace;
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

/* Whether the task is kept from running by its cgroup's quota, as far as the kernel tells it. */
INLINE int is_throttled(const struct wait_config *c, u64 task)
{
	u64 queue = 0;
	u32 count = 0;
	u8 throttled = 0;

	if (c->throttled_offset && !READ_KERNEL(throttled, task + c->throttled_offset) && throttled)
		return 1;
	return c->cfs_rq_offset && !READ_KERNEL(queue, task + c->cfs_rq_offset) && queue &&
	       !READ_KERNEL(count, queue + c->throttle_count_offset) && count;
}

/* Whether something happens with the chance part / whole; both are below 2^32. */
INLINE int by_chance(u64 part, u64 whole)
{
	return part >= whole || (u64)bpf_get_prandom_u32() * whole >> 32 < part;
}

/*
 * Choose whether the begin of this wait is told. How long it will be is not known: the longer the
 * thread's waits usually are, the likelier. Too many begins on a CPU have no chance; the end makes
 * up for all of that.
 */
INLINE int chooses_begin(const struct wait_config *c, struct thread *thread, struct wait_line *line,
			 u64 now)
{
	u64 threshold = (u32)c->threshold_ns, likely = threshold, usual;

	thread->threshold_ns = threshold;
	thread->likely_ns = 0;
	if (!threshold || line->next_begin_ns > now + BURST_NS)
		return 0;
	usual = thread->state == RUNNABLE ? thread->usual_preempted_ns : thread->usual_ns;
	if (usual && usual < threshold / LIKELY_FACTOR)
		likely = usual * LIKELY_FACTOR;
	thread->likely_ns = likely;
	return by_chance(likely, threshold);
}

/* The current thread leaves its CPU; whether a record of that is to be written. */
GLOBAL int leave(u64 task, u64 now, u64 state, u32 preempted, u32 sampled)
{
	struct thread *thread = LOOKUP(threads, &task);
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), tid = bpf_get_current_pid_tgid();
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	int in_namespace;

	if (!tid || !c || !line || !options || !own)
		return 0;
	if (thread && (thread->initial_tid != tid || state & TASK_DEAD)) {
		remove_thread(task);
		thread = 0;
	}
	if (state & TASK_DEAD)
		return 0;
	if (options->flags & WAIT_FILTERS && !is_followed(options, &own->record, &in_namespace)) {
		if (thread)
			thread->off_since_ns = 0;
		return 0;
	}
	if (!thread) {
		add_thread(now);
		thread = LOOKUP(threads, &task);
		if (!thread)
			return 0;
	}
	if (is_too_young(options, thread->start_time_ns))
		return 0;
	thread->epoch = c->epoch;
	thread->state = find_wait_state(state, preempted);
	/* It was woken between the decision to sleep and now. */
	thread->woken_ns = thread->woken_ns && thread->state != RUNNABLE ? now : 0;
	thread->off_since_ns = now;
	thread->flags = 0;
	if (!sampled)
		return 0;
	if (thread->state == RUNNABLE && is_throttled(c, task))
		thread->flags = WAIT_THROTTLED;
	return chooses_begin(c, thread, line, now);
}

/* Write the record of the current thread's wait. */
INLINE void begin_wait(void *ctx, u64 task, u64 now, struct wait_line *line, enum user_frames by,
		       int python)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct thread *thread = LOOKUP(threads, &task);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct record *record;

	if (!c || !thread || !options || !own)
		return;
	line->next_begin_ns = (line->next_begin_ns > now ? line->next_begin_ns : now) + c->begin_ns;
	record = &own->record;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->start_time_ns = thread->start_time_ns;
	record->tgid = thread->tgid;
	record->tid = thread->tid;
	record->cpu = cpu;
	record->kind = OFF_CPU;
	record->phase = WAIT_BEGUN;
	record->value = now;
	if (write_thread(ctx, options, record, OWN_FRAMES, by, python, thread->in_namespace) ==
	    WRITTEN) {
		line->begun++;
		thread->flags |= WAIT_HAS_BEGUN;
	} else {
		thread->likely_ns = 0; /* as if there had been no chance */
	}
}

/*
 * Whether a wait is sampled, now that its duration is known: the longer, the likelier, those from
 * the threshold on surely. The chance of its begin has to be taken out.
 */
INLINE int is_kept(const struct wait_config *c, const struct thread *thread, u64 duration)
{
	u64 threshold = thread->threshold_ns, likely = thread->likely_ns;
	u64 wanted = duration < threshold ? duration : threshold;

	if (!threshold || duration < c->min_ns)
		return 0;
	if (thread->flags & WAIT_HAS_BEGUN)
		return by_chance(wanted, likely);
	return wanted > likely && by_chance(wanted - likely, threshold - likely);
}

/* Write the end of a wait that is in the record, with so many bytes of kernel stack behind it. */
GLOBAL int write_end(u64 kernel_bytes)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct cpu_line *times = LOOKUP(cpu_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	const struct wait_end *end;
	struct record *record;
	int is_kept;

	if (!line || !times || !options || !own)
		return 0;
	record = &own->record;
	end = (const struct wait_end *)record->frames;
	is_kept = end->flags & WAIT_KEPT;
	*(volatile u64 *)&times->in_flight = IN_FLIGHT;
	record->time_ns = bpf_ktime_get_boot_ns();
	*(volatile u64 *)&times->in_flight = record->time_ns;
	record->cpu = cpu;
	if (is_kept)
		line->taken++;
	if (RING_OUTPUT(ring, record, HEADER_BYTES + sizeof(*end) + stack_bytes(kernel_bytes),
			find_wakeup(options)) &&
	    is_kept)
		line->ring_full++;
	*(volatile u64 *)&times->in_flight = 0;
	return 0;
}

/* Put the end of a wait into the record. */
INLINE void prepare_end(const struct config *options, struct record *record,
			const struct thread *thread, u64 since, u32 flags)
{
	struct wait_end *end = (struct wait_end *)record->frames;

	record->start_time_ns = thread->start_time_ns;
	record->cgroup_id = 0;
	record->span.trace_id[0] = record->span.trace_id[1] = record->span.span_id = 0;
	record->labels = 0;
	record->tgid = thread->tgid;
	record->tid = thread->tid;
	record->kind = OFF_CPU;
	record->phase = WAIT_ENDED;
	record->value = since;
	record->kernel_bytes = options->flags & KERNEL_STACKS ? NOT_RUNNING : NOT_COLLECTED;
	record->user_bytes = options->flags & USER_STACKS ? NOT_RUNNING : NOT_COLLECTED;
	record->python_bytes = NOT_COLLECTED;
	__builtin_memset(record->comm, 0, sizeof(record->comm));
	if (options->comm_offset && !(flags & WAIT_HAS_BEGUN))
		bpf_probe_read_kernel_str(record->comm, sizeof(record->comm),
					  (void *)(thread->task + options->comm_offset));
	end->since_ns = since;
	end->threshold_ns = thread->threshold_ns;
	end->state = thread->state;
	end->flags = flags;
	end->waker_tgid = thread->waker_tgid;
	end->waker_tid = thread->waker_tid;
	end->reserved = 0;
	__builtin_memcpy(end->waker_comm, thread->waker_comm, sizeof(end->waker_comm));
}

/* The longer waits of a thread of late: a long one counts at once, and less with each shorter one. */
INLINE u32 find_usual(u64 usual, u64 duration)
{
	usual -= usual >> USUAL_SHIFT;
	if (duration > usual)
		usual = duration;
	return usual < (u32)-1 ? usual + 1 : (u32)-1;
}

/*
 * A wait has ended; whether it is in the record and is to be written with a kernel stack. One whose
 * begin was told is written at once.
 */
INLINE int end_wait(const struct wait_config *c, struct thread *thread, u64 since, u64 asleep,
		    u64 runnable)
{
	u64 duration = asleep + runnable;
	u32 zero = 0, flags = thread->flags;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct wait_end *end;
	u8 iowait = 0;

	if (!options || !own)
		return 0;
	if (thread->state == RUNNABLE)
		thread->usual_preempted_ns = find_usual(thread->usual_preempted_ns, duration);
	else
		thread->usual_ns = find_usual(thread->usual_ns, duration);
	if (duration < c->min_ns)
		thread->below_ns += duration;
	if (is_kept(c, thread, duration))
		flags |= WAIT_KEPT;
	if (!(flags & (WAIT_KEPT | WAIT_HAS_BEGUN)))
		return 0;
	if (c->iowait_mask && !READ_KERNEL(iowait, thread->task + c->iowait_offset) &&
	    iowait & c->iowait_mask)
		flags |= WAIT_IOWAIT;
	prepare_end(options, &own->record, thread, since, flags);
	end = (struct wait_end *)own->record.frames;
	end->asleep_ns = asleep;
	end->runnable_ns = runnable;
	if (!(flags & WAIT_HAS_BEGUN))
		return 1;
	write_end(0);
	return 0;
}

/* A thread came to a CPU; as end_wait(). */
GLOBAL int arrive(u64 task, u64 now, u32 sampled)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct thread *thread = LOOKUP(threads, &task);
	u64 since, until;

	if (!c || !thread)
		return 0;
	thread->cpu = cpu;
	since = thread->off_since_ns;
	if (!since)
		return 0;
	thread->off_since_ns = 0;
	if (thread->epoch != c->epoch)
		return 0; /* it may have run meanwhile */
	if (now < since)
		now = since;
	until = thread->state == RUNNABLE ? since : thread->woken_ns;
	if (until - since > now - since)
		until = now; /* nobody told of its wake-up */
	thread->total_ns[RUNNABLE] += now - until;
	thread->total_ns[thread->state < WAIT_STATES ? thread->state : 0] += until - since;
	thread->waits++;
	thread->woken_ns = 0;
	return sampled ? end_wait(c, thread, since, until - since, now - until) : 0;
}

/* Write the end that is in the record, with the kernel stack of its task, which does not run. */
INLINE void write_late(void *task)
{
	u32 zero = 0;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	long result;

	if (!options || !own)
		return;
	if (options->flags & KERNEL_STACKS) {
		result = bpf_get_task_stack(task,
					    (u8 *)own->record.frames + sizeof(struct wait_end),
					    stack_bytes(options->stack_bytes), 0);
		own->record.kernel_bytes = result;
		write_end(stack_bytes(result));
	} else {
		write_end(0);
	}
}

/* How long a task has run since it came to a CPU last, without interrupts; 0: unknown. */
INLINE u64 find_run_ns(const struct wait_config *c, u64 task)
{
	u64 now = 0, before = 0;

	if (!c->runtime_offset || READ_KERNEL(now, task + c->runtime_offset) ||
	    READ_KERNEL(before, task + c->picked_offset) || now < before)
		return 0;
	return now - before;
}

/*
 * The kernel does not tell every switch (a few of a thousand, measured on 6.18): the task that
 * leaves is not the one that came last. How long both have run tells when one left and the other
 * came; where that is not known the waits are the shortest that they can be.
 */
GLOBAL int repair(u64 task, u64 now)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), state = 0;
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct thread *thread;
	u64 other, since, ran;

	if (!line || !c)
		return 0;
	line->missed++;
	since = line->switched_ns;
	ran = find_run_ns(c, task);
	if (LOOKUP(threads, &task) &&
	    arrive(task, ran && ran < now - since ? now - ran : since, 1))
		write_end(0);
	other = line->task;
	thread = LOOKUP(threads, &other);
	if (!thread || thread->off_since_ns || thread->cpu != cpu ||
	    READ_KERNEL(state, other + c->state_offset) || state & TASK_DEAD)
		return 0;
	ran = find_run_ns(c, other);
	thread->epoch = c->epoch;
	thread->flags = thread->likely_ns = 0;
	thread->threshold_ns = c->threshold_ns;
	thread->state = find_wait_state(state, 0);
	thread->off_since_ns = ran && ran < now - since ? since + ran : now;
	return 0;
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

INLINE int follow(u64 *ctx, int sampled, enum user_frames by, int python)
{
	u64 now = bpf_ktime_get_ns(), task = bpf_get_current_task();
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	const struct wait_config *c = LOOKUP(wait_config, &zero);

	if (!line || !c || !c->epoch)
		return 0;
	if (line->task != task && line->task && line->epoch == c->epoch)
		repair(task, now);
	if (leave(task, now, read_task_state(c, ctx, task), (u8)ctx[0], sampled))
		begin_wait(ctx, task, now, line, by, python);
	line->epoch = c->epoch;
	line->task = ctx[2];
	line->switched_ns = now;
	/* Out of memory it is a number, which functions take. */
	if (arrive(*(volatile u64 *)&line->task, now, sampled) && sampled)
		write_late((void *)ctx[2]);
	return 0;
}

/* Totals only. */
PROGRAM("tp_btf/sched_switch") int kprofiler_switch(u64 *ctx)
{
	return follow(ctx, 0, BY_FRAME_POINTERS, 0);
}

/* The same with samples, whose stacks are those of the program for samples on a CPU. */
PROGRAM("tp_btf/sched_switch") int kprofiler_switch_sample(u64 *ctx)
{
	return follow(ctx, 1, BY_FRAME_POINTERS, 0);
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch_unwind(u64 *ctx)
{
	return follow(ctx, 1, BY_TABLES, 0);
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch_unwind_5_10(u64 *ctx)
{
	return follow(ctx, 1, BY_TABLES_5_10, 0);
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch_sample_python(u64 *ctx)
{
	return follow(ctx, 1, BY_FRAME_POINTERS, 1);
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch_unwind_python(u64 *ctx)
{
	return follow(ctx, 1, BY_TABLES, 1);
}

PROGRAM("tp_btf/sched_switch") int kprofiler_switch_unwind_5_10_python(u64 *ctx)
{
	return follow(ctx, 1, BY_TABLES_5_10, 1);
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
	u64 ids;

	if (!thread || thread->woken_ns)
		return 0;
	if (!thread->off_since_ns) {
		c = LOOKUP(wait_config, &zero);
		if (!c || READ_KERNEL(on_rq, thread->task + c->on_rq_offset) || on_rq)
			return 0;
	}
	thread->woken_ns = bpf_ktime_get_ns();
	c = LOOKUP(wait_config, &zero);
	if (c && c->wakers) {
		ids = bpf_get_current_pid_tgid();
		thread->waker_tgid = ids >> 32;
		thread->waker_tid = ids;
		bpf_get_current_comm(thread->waker_comm, sizeof(thread->waker_comm));
		thread->flags |= WAIT_WOKEN;
	}
	return 0;
}

/*
 * Run for each task now and then: those whose wait is sampled for sure by now, but whose begin was
 * not told, tell it late, so that a thread that is stuck is seen before its wait ends. Has scratch
 * memory of its own, as it can be interrupted.
 */
PROGRAM("iter/task") int kprofiler_waiting(u64 *ctx)
{
	void *typed = (void *)ctx[1]; /* after the iteration's own struct */
	u64 task = (u64)typed, now = bpf_ktime_get_ns(), bytes = 0, since;
	u32 zero = 0;
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct config *options = LOOKUP(config, &zero);
	struct record *record = LOOKUP(late_begin, &zero);
	struct thread *thread;
	long result;

	if (!typed || !c || !options || !record)
		return 0;
	thread = LOOKUP(threads, &task);
	if (!thread)
		return 0;
	since = thread->off_since_ns;
	if (!since || thread->epoch != c->epoch || thread->flags & WAIT_HAS_BEGUN ||
	    !thread->threshold_ns || now < since || now - since < thread->threshold_ns ||
	    now - since < c->min_ns)
		return 0;
	record->kernel_bytes = record->python_bytes = NOT_COLLECTED;
	record->user_bytes = options->flags & USER_STACKS ? NOT_RUNNING : NOT_COLLECTED;
	if (options->flags & KERNEL_STACKS) {
		result = bpf_get_task_stack(typed, record->frames,
					    stack_bytes(options->stack_bytes), 0);
		record->kernel_bytes = result;
		bytes = stack_bytes(result);
	}
	record->time_ns = bpf_ktime_get_boot_ns() - (now - since);
	record->start_time_ns = thread->start_time_ns;
	record->tgid = thread->tgid;
	record->tid = thread->tid;
	record->cpu = thread->cpu;
	record->kind = OFF_CPU;
	record->phase = WAIT_BEGUN;
	record->value = since;
	if (options->comm_offset)
		bpf_probe_read_kernel_str(record->comm, sizeof(record->comm),
					  (void *)(thread->task + options->comm_offset));
	if (RING_OUTPUT(ring, record, HEADER_BYTES + bytes, BPF_RB_NO_WAKEUP) ||
	    thread->off_since_ns != since)
		return 0;
	thread->likely_ns = thread->threshold_ns; /* the chance of a wait this long */
	thread->flags |= WAIT_HAS_BEGUN;
	return 0;
}
