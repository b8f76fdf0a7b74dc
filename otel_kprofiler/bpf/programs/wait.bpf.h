// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures how long threads are off-CPU, and records their states. sampler.bpf.c includes this file
 * after its own programs.
 *
 * Programs at sched_switch run with interrupts off and the run queue locked: they must not block.
 * Of the sampler's events, only hardware events can interrupt these programs, which use the
 * sampler's scratch memory: see take_scratch().
 */

#include "wait_types.bpf.h"

SCRATCH(late_begin, struct record);

/*
 * Accesses a member of the tracepoint's task, or of a struct that it points to, by its offset in
 * wait_layout.
 */
#define MEMBER(type, of, offset) (*(type *)((u8 *)(of) + wait_layout.offset))

/* Returns the clock of a task's current or last run queue, or 0 if unknown. */
INLINE u64 read_queue_clock(u64 task)
{
	return MEMBER(u64, MEMBER(void *, MEMBER(void *, task, cfs_rq), rq), clock);
}

/* Returns the current time on the clock used in struct thread, based on CLOCK_MONOTONIC. */
INLINE u64 find_clock(const struct wait_line *line)
{
	return bpf_ktime_get_ns() - line->offset_ns;
}

/*
 * Returns the switch time that the scheduler has just read, because reading a clock would cost
 * more than everything else here. If a wake-up preempts a task, returns the time of the wake-up.
 * `task` is the tracepoint's argument.
 */
INLINE u64 find_switch_time(struct wait_line *line, u64 task)
{
	u64 clock = wait_layout.run_delay ? read_queue_clock(task) : 0;

	if (!clock)
		return find_clock(line);
	if (clock - line->set_ns > SET_EVERY_NS) {
		line->offset_ns = bpf_ktime_get_ns() - clock;
		line->set_ns = clock;
	}
	return clock;
}

INLINE u32 find_bucket(u64 task)
{
	return task * 0x9e3779b97f4a7c15 >> 32 & wait_layout.bucket_mask; /* 2^64 / golden ratio */
}

/* Returns the index of the task's entry in `threads`, or NO_THREAD if the task has no entry. */
INLINE u32 find_place(u64 task)
{
	u32 number = find_bucket(task);
	const struct bucket *bucket = LOOKUP(buckets, &number);

	if (!bucket)
		return NO_THREAD;
#pragma clang loop unroll(full)
	for (u32 i = 0; i < PLACES; i++)
		if (bucket->tasks[i] == task)
			return number * PLACES + i;
	return NO_THREAD;
}

/* Returns the wait state of a task that is being switched out. */
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

/*
 * Claims a free index in `threads` for a task; returns NO_THREAD if there is none. If several CPUs
 * claim an index at the same time, a CPU obtains the index only if it observes no other claim.
 */
GLOBAL int claim_place(u64 task)
{
	u32 number = find_bucket(task), place;
	struct bucket *bucket = LOOKUP(buckets, &number);
	struct thread *thread;

	if (!bucket)
		return NO_THREAD;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < PLACES; i++) {
		if (bucket->tasks[i])
			continue;
		place = number * PLACES + i;
		thread = LOOKUP(threads, &place);
		if (!thread)
			continue;
		__sync_fetch_and_add(&thread->claims, 1);
		if (*(volatile u32 *)&thread->claims == 1)
			return place;
		__sync_fetch_and_add(&thread->claims, -1);
	}
	return NO_THREAD;
}

/* Adds the current thread; returns its index in `threads`, or NO_THREAD. */
GLOBAL int add_thread(u64 task, u64 now)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	u32 place = claim_place(task), number = place / PLACES;
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct thread *thread = LOOKUP(threads, &place);
	struct bucket *bucket = LOOKUP(buckets, &number);
	u64 ids = bpf_get_current_pid_tgid();
	int in_namespace;

	if (!line || !options || !own)
		return NO_THREAD;
	if (!thread || !bucket) {
		line->no_room++;
		return NO_THREAD;
	}
	is_followed(options, &own->record, &in_namespace); /* sets the record's ids */
	__builtin_memset(thread->total_ns, 0, sizeof(thread->total_ns));
	thread->task = task;
	thread->off_since_ns = thread->woken_ns = 0;
	thread->initial_tid = ids;
	thread->cpu = cpu;
	thread->usual = thread->usual_preempted = 0;
	thread->waits = thread->below_ns = 0;
	thread->start_time_ns = start_time(options);
	thread->id = ids << 32 | (u32)(now >> 10);
	thread->tgid = own->record.tgid;
	thread->tid = own->record.tid;
	thread->in_namespace = in_namespace;
	bucket->tasks[place % PLACES] = task;
	return place;
}

/* Returns whether less than `eighths` / 8 of the ring is used, to leave space for other records. */
INLINE int has_room(const struct config *options, u64 eighths)
{
	return RING_USED(ring) < options->wakeup_bytes / 4 * eighths; /* wakeup_bytes: ring / 2 */
}

/* Stops tracking a thread: sends its totals to user space, and frees its entry. */
GLOBAL int remove_thread(u32 place)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), number = place / PLACES;
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct thread *thread = LOOKUP(threads, &place);
	struct bucket *bucket = LOOKUP(buckets, &number);
	struct record *record;

	if (!line || !options || !own || !thread || !bucket)
		return 0;
	record = &own->record;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->kind = OFF_CPU;
	record->phase = THREAD_ENDED;
	record->tgid = thread->tgid;
	record->tid = thread->tid;
	if (!bpf_probe_read_kernel(record->frames, sizeof(*thread), thread) &&
	    (!has_room(options, ENDED_EIGHTHS) ||
	     RING_OUTPUT(ring, record, HEADER_BYTES + sizeof(*thread), find_wakeup(options, 0))))
		line->lost++;
	bucket->tasks[place % PLACES] = 0;
	__sync_fetch_and_add(&thread->claims, -1);
	return 0;
}

/* Returns whether a task is throttled by its cgroup's quota, if the kernel exposes this. */
INLINE int is_throttled(u64 task)
{
	void *queue;

	if (wait_layout.throttled && MEMBER(u8, task, throttled))
		return 1;
	if (!wait_layout.throttle_count)
		return 0;
	queue = MEMBER(void *, task, cfs_rq);
	return MEMBER(u32, queue, throttle_count) != 0;
}

/*
 * Returns a pseudorandom number; cheaper than a BPF helper (Marsaglia, Xorshift RNGs: 13, 7, 17).
 */
INLINE u32 draw(u64 *state)
{
	u64 x = *state;

	if (!x)
		x = (u64)bpf_get_prandom_u32() << 32 | 1;
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	*state = x;
	return x >> 32;
}

/* Returns true with probability part / whole; both must be below 2^32. */
INLINE int by_chance(u64 *state, u64 part, u64 whole)
{
	return part >= whole || (u64)draw(state) * whole >> 32 < part;
}

/*
 * Decides whether to report the start of a wait. The wait's duration is not known yet, so the
 * probability grows with the usual duration of the thread's waits. Skips starts that exceed this
 * CPU's rate limit. is_kept() compensates for skipped starts.
 */
INLINE int chooses_begin(const struct wait_config *c, struct thread *thread, struct wait_line *line,
			 u64 now)
{
	u64 threshold = (u32)(c->threshold_ns >> UNIT_SHIFT), likely = threshold, usual;

	thread->threshold = threshold;
	thread->likely = 0;
	if (!threshold || line->next_begin_ns > now + BURST_NS)
		return 0;
	usual = thread->state == RUNNABLE ? thread->usual_preempted : thread->usual;
	if (usual && usual < threshold / LIKELY_FACTOR)
		likely = usual * LIKELY_FACTOR;
	thread->likely = likely;
	return by_chance(&line->random, likely, threshold);
}

/*
 * Returns the current thread's index in `threads`, or NO_THREAD if it is not tracked. Adds the
 * thread if it is new, and removes it if it is exiting.
 */
GLOBAL int admit(u64 task, u64 now, u32 is_dead)
{
	u32 zero = 0, place = find_place(task);
	struct thread *thread = LOOKUP(threads, &place);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	int in_namespace;

	if (!options || !own)
		return NO_THREAD;
	if (thread && (thread->initial_tid != (u32)bpf_get_current_pid_tgid() || is_dead)) {
		remove_thread(place);
		thread = 0;
	}
	if (is_dead)
		return NO_THREAD;
	if (options->flags & WAIT_FILTERS && !is_followed(options, &own->record, &in_namespace)) {
		if (thread)
			thread->off_since_ns = 0;
		return NO_THREAD;
	}
	return thread ? place : add_thread(task, now);
}

/*
 * Handles a thread that is leaving its CPU; returns whether to report the start of its wait. `task`
 * is the tracepoint's argument.
 */
INLINE int leave(const struct wait_config *c, const struct config *options, struct wait_line *line,
		 struct thread *thread, u64 task, u64 now, u64 state, u32 preempted, int sampled)
{
	if (is_too_young(options, thread->start_time_ns))
		return 0;
	thread->epoch = c->epoch;
	thread->state = find_wait_state(state, preempted);
	if (wait_layout.run_delay)
		thread->run_delay_ns = MEMBER(u64, task, run_delay);
	else /* The thread was woken after deciding to sleep. */
		thread->woken_ns = thread->woken_ns && thread->state != RUNNABLE ? now : 0;
	thread->off_since_ns = now;
	thread->begun_ns = 0;
	thread->flags = 0;
	if (!sampled)
		return 0;
	if (thread->state == RUNNABLE && is_throttled(task))
		thread->flags = WAIT_THROTTLED;
	return chooses_begin(c, thread, line, now);
}

/* Writes a wait-start record for the current thread. */
INLINE void begin_wait(void *ctx, const struct wait_config *c, struct config *options,
		       struct wait_line *line, struct thread *thread, u32 cpu, u64 now,
		       enum user_frames by, int python)
{
	u32 zero = 0;
	struct scratch *own = LOOKUP(scratch, &zero);
	struct record *record;

	thread->flags |= WAIT_UNWRITTEN;
	if (!own || !has_room(options, WAIT_EIGHTHS))
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
	thread->begun_ns = bpf_ktime_get_ns();
	if (write_thread(ctx, options, record, by, python, thread->in_namespace, 0) ==
	    WRITTEN) {
		line->begun++;
		thread->flags ^= WAIT_UNWRITTEN | WAIT_HAS_BEGUN;
	}
}

/*
 * Returns the duration threshold for a wait, in units of 256 ns. Raises the threshold set by
 * user space while this CPU exceeds its sampling rate.
 */
INLINE u64 raise_threshold(struct sample_budget *budget, u64 chosen_ns, u64 sample_ns,
			   u64 threshold, u64 now)
{
	u64 ahead, steps;

	if (budget->sampled_from_ns != chosen_ns) {
		budget->sampled_from_ns = chosen_ns;
		budget->next_sample_ns = now;
	}
	if (budget->next_sample_ns < now)
		budget->next_sample_ns = now;
	ahead = budget->next_sample_ns - now;
	if (ahead <= BURST_NS || !sample_ns)
		return threshold;
	steps = (ahead - BURST_NS) / (sample_ns * SAMPLES_PER_STEP);
	threshold <<= steps < MOST_STEPS ? steps : MOST_STEPS;
	return threshold > (u32)-1 ? (u32)-1 : threshold;
}

/*
 * Returns whether a selected wait is still sampled after its threshold was raised. The threshold
 * does not depend on this wait, so estimates remain unbiased. `duration` is in units of 256 ns.
 */
INLINE int fits_budget(const struct wait_config *c, struct wait_line *line, struct thread *thread,
		       u64 duration, u64 now)
{
	u64 threshold = raise_threshold(&line->budget, c->threshold_ns, c->sample_ns,
					thread->threshold, now);

	if (threshold > thread->threshold) {
		if (duration < thread->threshold)
			duration = thread->threshold;
		if (!by_chance(&line->random, duration, threshold))
			return 0;
		thread->threshold = threshold;
	}
	line->budget.next_sample_ns += c->sample_ns;
	return 1;
}

/*
 * Decides whether to sample a wait of known duration. The probability is proportional to the
 * duration, up to 1 at the threshold. The decision takes into account how likely the start was
 * to be reported.
 */
INLINE int is_kept(const struct wait_config *c, struct wait_line *line, struct thread *thread,
		   u64 duration_ns, u64 now)
{
	u64 threshold = thread->threshold, likely = thread->likely, duration, wanted;

	if (!threshold || duration_ns < c->min_ns)
		return 0;
	/* The duration is rounded up or down at random, which preserves the mean. */
	duration = (duration_ns + (draw(&line->random) & ((1 << UNIT_SHIFT) - 1))) >> UNIT_SHIFT;
	wanted = duration < threshold ? duration : threshold;
	if (thread->flags & (WAIT_HAS_BEGUN | WAIT_UNWRITTEN)) {
		if (!by_chance(&line->random, wanted, likely))
			return 0;
	} else if (wanted <= likely || !by_chance(&line->random, wanted - likely, threshold - likely)) {
		return 0;
	}
	return fits_budget(c, line, thread, duration, now);
}

/* Writes the record for a wait's end, with `kernel_bytes` bytes of kernel stack. */
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
	if ((!has_room(options, WAIT_EIGHTHS) ||
	     RING_OUTPUT(ring, record, HEADER_BYTES + sizeof(*end) + stack_bytes(kernel_bytes),
			 find_wakeup(options, 0))) &&
	    is_kept)
		line->ring_full++;
	*(volatile u64 *)&times->in_flight = 0;
	return 0;
}

/* Fills in a wait-end record. */
INLINE void prepare_end(const struct config *options, struct record *record,
			const struct thread *thread, u64 since, u32 flags)
{
	struct wait_end *end = (struct wait_end *)record->frames;

	record->start_time_ns = thread->start_time_ns;
	note_program(options, record, thread->task);
	record->cgroup_id = 0;
	record->span.trace_id[0] = record->span.trace_id[1] = record->span.span_id = 0;
	record->labels = 0;
	record->context_bytes = 0;
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
	end->threshold_ns = (u64)thread->threshold << UNIT_SHIFT;
	end->state = thread->state;
	end->flags = flags;
	end->waker_tgid = thread->waker_tgid;
	end->waker_tid = thread->waker_tid;
	__builtin_memcpy(end->waker_comm, thread->waker_comm, sizeof(end->waker_comm));
}

/* Updates the decaying maximum of a thread's wait durations, in units of 256 ns. */
INLINE u32 find_usual(u64 usual, u64 duration_ns)
{
	u64 duration = duration_ns >> UNIT_SHIFT;

	usual -= usual >> USUAL_SHIFT;
	if (duration > usual)
		usual = duration;
	return usual < (u32)-1 ? usual + 1 : (u32)-1;
}

/*
 * Prepares the end-of-wait record; returns whether the caller must add a stack and write the
 * record. If the wait's start was reported, writes the record immediately, without a stack.
 */
GLOBAL int tell_end(u32 place, u64 since, u64 asleep, u64 runnable, u32 flags)
{
	u32 zero = 0;
	struct thread *thread = LOOKUP(threads, &place);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct wait_end *end;
	u8 iowait = 0;

	if (!thread || !options || !own)
		return 0;
	if (wait_layout.iowait_mask && !READ_KERNEL(iowait, thread->task + wait_layout.iowait) &&
	    iowait & wait_layout.iowait_mask)
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

/*
 * Returns whether a record of the wait's start, which contains the span, was written when the
 * thread left its CPU.
 */
INLINE int has_begun(const struct thread *thread)
{
	return thread->flags & WAIT_HAS_BEGUN && thread->begun_ns;
}

/*
 * Discards the reported start of a wait whose thread has run since (see repair()), perhaps in
 * another span. The end of the wait is written as if the start had not been reported.
 */
INLINE void drop_begin(struct thread *thread)
{
	thread->flags ^= WAIT_HAS_BEGUN | WAIT_UNWRITTEN;
}

/*
 * Returns how long a thread was off the CPU before it was switched in `ago` nanoseconds ago. A wait
 * whose start was written with a span is measured on CLOCK_MONOTONIC, because the scheduler clocks
 * on two CPUs may differ by up to a tick's delay.
 */
INLINE u64 find_duration(const struct thread *thread, u64 now, u64 ago)
{
	u64 since = thread->off_since_ns;

	if (has_begun(thread)) {
		since = thread->begun_ns;
		now = bpf_ktime_get_ns();
	}
	return now < since + ago ? 0 : now - ago - since;
}

/*
 * Handles a thread that was switched in after `duration` ns off the CPU. During the last `runnable`
 * ns of `duration`, the thread waited for a CPU. Returns the result of tell_end().
 */
INLINE int arrive(const struct wait_config *c, struct wait_line *line, struct thread *thread,
		  u32 place, u64 now, u64 duration, u64 runnable, int sampled)
{
	u64 since = thread->off_since_ns, asleep;
	u32 state = thread->state, flags = thread->flags;

	if (!since)
		return 0;
	thread->off_since_ns = 0;
	if (!wait_layout.run_delay)
		thread->woken_ns = 0;
	if (thread->epoch != c->epoch)
		return 0; /* the thread may have run while tracking was paused */
	if (state == RUNNABLE || runnable > duration)
		runnable = duration;
	asleep = duration - runnable;
	thread->total_ns[RUNNABLE] += runnable;
	thread->total_ns[state < WAIT_STATES ? state : 0] += asleep;
	thread->waits++;
	if (!sampled)
		return 0;
	if (state == RUNNABLE)
		thread->usual_preempted = find_usual(thread->usual_preempted, duration);
	else
		thread->usual = find_usual(thread->usual, duration);
	if (duration < c->min_ns)
		thread->below_ns += duration;
	if (is_kept(c, line, thread, duration, now))
		flags |= WAIT_KEPT;
	return flags & (WAIT_KEPT | WAIT_HAS_BEGUN) ?
		       tell_end(place, since, asleep, runnable, flags) :
		       0;
}

/* Returns how long a woken thread has waited for a CPU: its run delay, or time since it woke. */
INLINE u64 find_runnable(const struct thread *thread, u64 task, u64 now)
{
	u64 waited, queued, clock;

	if (thread->state == RUNNABLE)
		return 0; /* the thread did not sleep */
	if (!wait_layout.run_delay)
		return thread->woken_ns && thread->woken_ns < now ? now - thread->woken_ns : 0;
	waited = MEMBER(u64, task, run_delay) - thread->run_delay_ns;
	queued = MEMBER(u64, task, queued);
	if (queued) {
		clock = read_queue_clock(task);
		if (clock > queued)
			waited += clock - queued;
	}
	return waited;
}

/* Writes a wait-end record with the kernel stack of the task that is being switched in. */
INLINE void write_late(void *task)
{
	u32 zero = 0;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	long result;

	if (!options || !own)
		return;
	if (options->flags & KERNEL_STACKS) {
		result = get_sleeping_stack(task,
					    (void *)own->record.frames + sizeof(struct wait_end),
					    stack_bytes(options->stack_bytes), 1);
		own->record.kernel_bytes = result;
		write_end(stack_bytes(result));
	} else {
		write_end(0);
	}
}

/* Returns how long a task has run since it last got a CPU, without interrupts, or 0 if unknown. */
INLINE u64 find_run_ns(u64 task)
{
	u64 now = 0, before = 0;

	if (!wait_layout.runtime || READ_KERNEL(now, task + wait_layout.runtime) ||
	    READ_KERNEL(before, task + wait_layout.picked) || now < before)
		return 0;
	return now - before;
}

/*
 * Handles a missed switch event (a few per thousand on 6.18): `task`, which is being switched out,
 * is not the task last seen being switched in. The run time of `task` shows when `task` was
 * switched in, and the run time of the task last seen shows when that task was switched out. If
 * either run time is unknown, assumes the shortest possible wait.
 */
GLOBAL int repair(u64 task, u64 now)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), state = 0, place = find_place(task);
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct thread *thread = LOOKUP(threads, &place);
	u64 other, since, ran, delay = 0;

	if (!line || !c)
		return 0;
	line->missed++;
	since = line->switched_ns;
	if (thread) {
		if (has_begun(thread) && wait_layout.runtime &&
		    (READ_KERNEL(ran, task + wait_layout.picked) || thread->ran_ns != (u32)ran))
			drop_begin(thread);
		ran = find_run_ns(task);
		ran = ran && ran < now - since ? now - ran : since;
		if (!wait_layout.run_delay)
			delay = find_runnable(thread, 0, ran);
		else if (!READ_KERNEL(delay, task + wait_layout.run_delay))
			delay -= thread->run_delay_ns;
		if (arrive(c, line, thread, place, ran, find_duration(thread, now, now - ran),
			   delay, 1))
			write_end(0);
	}
	other = line->task;
	place = find_place(other);
	thread = LOOKUP(threads, &place);
	if (!thread || thread->off_since_ns || thread->cpu != cpu ||
	    READ_KERNEL(state, other + wait_layout.state) || state & TASK_DEAD)
		return 0;
	ran = find_run_ns(other);
	thread->epoch = c->epoch;
	thread->flags = thread->likely = 0;
	thread->begun_ns = 0;
	thread->threshold = c->threshold_ns >> UNIT_SHIFT;
	thread->state = find_wait_state(state, 0);
	delay = 0;
	if (wait_layout.run_delay)
		READ_KERNEL(delay, other + wait_layout.run_delay);
	thread->run_delay_ns = delay;
	thread->off_since_ns = ran && ran < now - since ? since + ran : now;
	return 0;
}

/*
 * Since 5.19, the tracepoint passes the state as an argument. On older kernels, a waker on another
 * CPU may already have changed the state that is read from the task.
 */
INLINE u64 read_task_state(u64 *ctx)
{
	if (LINUX_KERNEL_VERSION >= (5 << 16 | 19 << 8))
		return (u32)ctx[3];
	return MEMBER(u32, ctx[1], state);
}

INLINE int follow_switch(u64 *ctx, int sampled, enum user_frames by, int python)
{
	u64 now, state, task, prev = ctx[1];
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), place, tid;
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct config *options = LOOKUP(config, &zero);
	struct thread *thread;

	if (!line || !c || !options || !c->epoch)
		return 0;
	now = find_switch_time(line, ctx[1]);
	place = line->place;
	/* The compiler must not replace ctx[1], a typed pointer, with line->task, a scalar. */
	asm volatile("" : "+r"(prev));
	if (line->task != prev || line->epoch != c->epoch) {
		task = bpf_get_current_task();
		if (line->epoch == c->epoch)
			repair(task, now);
		line->task = task;
		place = NO_THREAD;
	}
	tid = MEMBER(u32, ctx[1], pid);
	if (tid) { /* the idle task never waits */
		state = read_task_state(ctx);
		thread = LOOKUP(threads, &place);
		if (!thread || thread->initial_tid != tid || state & TASK_DEAD ||
		    options->flags & WAIT_FILTERS) {
			place = admit(line->task, now, !!(state & TASK_DEAD));
			thread = LOOKUP(threads, &place);
		}
		if (thread && leave(c, options, line, thread, ctx[1], now, state, (u8)ctx[0],
				    sampled)) {
			if (wait_layout.runtime)
				thread->ran_ns = MEMBER(u64, ctx[1], runtime);
			begin_wait(ctx, c, options, line, thread, cpu, now, by, python);
		}
	}
	line->epoch = c->epoch;
	line->task = ctx[2];
	line->place = NO_THREAD;
	line->switched_ns = now;
	tid = MEMBER(u32, ctx[2], pid);
	if (!tid)
		return 0;
	/* To the verifier, a pointer read from memory is a scalar, so arithmetic is allowed. */
	place = find_place(*(volatile u64 *)&line->task);
	thread = LOOKUP(threads, &place);
	if (!thread || thread->initial_tid != tid)
		return 0;
	line->place = place;
	thread->cpu = cpu;
	if (has_begun(thread) && wait_layout.runtime &&
	    thread->ran_ns != (u32)MEMBER(u64, ctx[2], runtime))
		drop_begin(thread);
	if (arrive(c, line, thread, place, now, find_duration(thread, now, 0),
		   find_runnable(thread, ctx[2], now), sampled) &&
	    sampled)
		write_late((void *)ctx[2]);
	return 0;
}

/*
 * Marks the scratch memory as used or free. The memory is always free when a thread is switched
 * out.
 */
INLINE void mark_scratch(u64 is_taken)
{
	u32 zero = 0;
	struct scratch *own;

	if (!MAY_NEST)
		return;
	own = LOOKUP(scratch, &zero);
	if (own)
		*(volatile u64 *)&own->is_taken = is_taken;
}

INLINE int follow(u64 *ctx, int sampled, enum user_frames by, int python)
{
	mark_scratch(1);
	follow_switch(ctx, sampled, by, python);
	mark_scratch(0);
	return 0;
}

/* Measures totals, but takes no samples. */
PROGRAM("tp_btf/sched_switch") int kprofiler_switch(u64 *ctx)
{
	return follow(ctx, 0, BY_FRAME_POINTERS, 0);
}

/* Measures totals and samples waits. Samples have the same stacks as on-CPU samples. */
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
 * Handles a thread that is becoming runnable. Skips a thread that is still on its CPU, unless it
 * has left the run queue and is thus about to leave the CPU.
 */
PROGRAM("tp_btf/sched_waking") int kprofiler_waking(u64 *ctx)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), place;
	const struct wait_config *c = LOOKUP(wait_config, &zero);
	struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct thread *thread;
	u64 ids;

	if (!c || !line)
		return 0;
	line->waking = ctx[0];
	place = find_place(*(volatile u64 *)&line->waking);
	thread = LOOKUP(threads, &place);
	if (!thread)
		return 0;
	if (thread->off_since_ns ? thread->woken_ns >= thread->off_since_ns :
				   MEMBER(u32, ctx[0], on_rq))
		return 0;
	thread->woken_ns = find_clock(line);
	if (c->wakers) {
		ids = bpf_get_current_pid_tgid();
		thread->waker_tgid = ids >> 32;
		thread->waker_tid = ids;
		bpf_get_current_comm(thread->waker_comm, sizeof(thread->waker_comm));
		thread->flags |= WAIT_WOKEN;
	}
	return 0;
}

/*
 * Runs periodically for every task. Records when a woken thread began to wait for a CPU. Also
 * reports the start of a wait that will certainly be sampled and whose start was not reported, so
 * that a stuck thread appears before its wait ends. The number of late starts is limited, to
 * reserve space in the ring. Unlike the sched_switch programs, this program can be interrupted, so
 * it uses a separate record.
 */
PROGRAM("iter/task") int kprofiler_waiting(u64 *ctx)
{
	void *typed = (void *)ctx[1]; /* the task, which follows the iterator's context struct */
	u64 now, bytes = 0, since, runnable;
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), place;
	const struct wait_line *line = LOOKUP(wait_lines, &cpu);
	struct wait_config *c = LOOKUP(wait_config, &zero);
	struct config *options = LOOKUP(config, &zero);
	struct record *record = LOOKUP(late_begin, &zero);
	struct thread *thread;
	long result;

	if (!typed || !c || !options || !record || !line)
		return 0;
	now = find_clock(line);
	record->value = (u64)typed;
	place = find_place(*(volatile u64 *)&record->value);
	thread = LOOKUP(threads, &place);
	if (!thread)
		return 0;
	since = thread->off_since_ns;
	if (!since || thread->epoch != c->epoch || now < since)
		return 0;
	if (wait_layout.run_delay && thread->woken_ns < since) {
		runnable = find_runnable(thread, (u64)typed, now);
		if (runnable)
			thread->woken_ns = runnable < now - since ? now - runnable : since;
	}
	if (thread->flags & WAIT_HAS_BEGUN || !thread->threshold ||
	    (now - since) >> UNIT_SHIFT < thread->threshold || now - since < c->min_ns ||
	    !c->late_begins || !has_room(options, WAIT_EIGHTHS))
		return 0;
	c->late_begins--;
	record->kernel_bytes = record->python_bytes = NOT_COLLECTED;
	record->user_bytes = options->flags & USER_STACKS ? NOT_RUNNING : NOT_COLLECTED;
	if (options->flags & KERNEL_STACKS) {
		result = get_sleeping_stack(typed, record->frames,
					    stack_bytes(options->stack_bytes), 1);
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
	note_program(options, record, thread->task);
	if (options->comm_offset)
		bpf_probe_read_kernel_str(record->comm, sizeof(record->comm),
					  (void *)(thread->task + options->comm_offset));
	if (RING_OUTPUT(ring, record, HEADER_BYTES + bytes, BPF_RB_NO_WAKEUP) ||
	    thread->off_since_ns != since)
		return 0;
	thread->likely = thread->threshold; /* this start was selected with probability 1 */
	thread->flags |= WAIT_HAS_BEGUN;
	return 0;
}
