// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Measures waits for kernel locks, at the contention_begin and contention_end tracepoints
 * (since 5.19). Included by sampler.bpf.c.
 *
 * The programs may run in interrupts and with any lock held. Writing a sample takes the ring's
 * lock, which would deadlock if the thread had just acquired that lock. Map and ring locks are
 * taken only by the profiler's process, and by the sampler's programs while they use the scratch
 * memory. Therefore, no samples are taken in the profiler's process or while the scratch memory is
 * in use.
 */
#pragma once

/* LCB_F_*, include/trace/events/lock.h */
enum lock_flags {
	LOCK_SPIN = 1,
	LOCK_READ = 2,
	LOCK_WRITE = 4,
	LOCK_MUTEX = 32,
};

enum {
	LOCK_FLAGS = 64,  /* number of flag combinations */
	LOCK_PHASE = 128, /* base of a lock sample's phase; the lock's flags are added to it */
	LOCK_PLACES = 8,
	OWNER_FLAGS = 7,	 /* MUTEX_FLAGS, kernel/locking/mutex.h; rwsem.c has fewer flags */
	RWSEM_READER_OWNED = 1, /* rwsem.c: the owner is the last reader, which may have exited */
};

#define INITIAL_NAMESPACE 0xeffffffcULL /* PROC_PID_INIT_INO, include/linux/proc_ns.h */

/* Written by locks.py; change both files together. */
struct lock_layout {
	u64 number; /* event number, starting at 1 */
	u64 by;	    /* enum user_frames */
	u64 python;
	u64 bucket_mask;  /* number of buckets minus 1 */
	u64 own_device;	  /* pid namespace of the profiler's process */
	u64 own_inode;
	u64 own_tgid;	  /* id of the profiler's process in its pid namespace */
	u64 mutex_owner;  /* offset of mutex.owner plus 1; 0: unknown */
	u64 rwsem_owner;  /* offset of rw_semaphore.owner plus 1; 0: unknown */
	u64 pid;	  /* offset of task_struct.pid */
};

const volatile struct lock_layout lock_layout SECTION(".rodata.locks");

struct lock_config {
	u64 threshold_ns; /* longer waits are always sampled; a multiple of 1 << UNIT_SHIFT; 0: no sampling */
	u64 sample_ns;	  /* average interval between samples on a CPU */
};

struct lock_sums {
	u64 waits;
	u64 total_ns;
};

/*
 * Per-CPU counters in separate cache lines. Each CPU writes only its own counters; user space maps
 * them.
 */
struct lock_line {
	u64 no_room;   /* waits for which no entry was free */
	u64 unmatched; /* ends of waits whose start is unknown */
	u64 unended;   /* waits whose end is unknown */
	u64 skipped;   /* waits not counted, because another program was using the scratch memory */
	u64 random;
	struct sample_budget budget;
	u64 unused;
	struct lock_sums by_flags[LOCK_FLAGS];
};

/* A wait in progress. Nested waits, and waits in interrupts, have separate entries. */
struct lock_wait {
	u64 task; /* 0: free */
	u64 lock;
	u64 begun_ns; /* CLOCK_MONOTONIC */
	u32 flags;
	u32 holder; /* thread id of the holder, as in records */
	struct comm holder_comm;
	u64 claims; /* number of CPUs that claim this entry; 1 while in use */
};

struct lock_bucket {
	struct lock_wait places[LOCK_PLACES];
};

ARRAY(lock_buckets, struct lock_bucket, SIZED_BY_LOADER);
MMAP_ARRAY(lock_lines, struct lock_line, SIZED_BY_LOADER);
MMAP_ARRAY(lock_config, struct lock_config, 1); /* written by user space, without a system call */

INLINE struct lock_bucket *find_lock_bucket(u64 task, u64 lock)
{
	u32 number = (task + 3 * lock) * 0x9e3779b97f4a7c15 >> 32 & lock_layout.bucket_mask;

	return LOOKUP(lock_buckets, &number);
}

/* Finds the current task's wait for a lock; returns 0 if there is none. */
INLINE struct lock_wait *find_lock_wait(struct lock_bucket *bucket, u64 task, u64 lock)
{
#pragma clang loop unroll(full)
	for (u32 i = 0; i < LOCK_PLACES; i++) {
		struct lock_wait *wait = &bucket->places[i];

		if (wait->task == task && wait->lock == lock)
			return wait;
	}
	return 0;
}

/* Claims a free entry; see claim_place(). */
INLINE struct lock_wait *claim_lock_wait(struct lock_bucket *bucket)
{
#pragma clang loop unroll(full)
	for (u32 i = 0; i < LOCK_PLACES; i++) {
		struct lock_wait *wait = &bucket->places[i];

		if (wait->task)
			continue;
		__sync_fetch_and_add(&wait->claims, 1);
		if (*(volatile u64 *)&wait->claims == 1)
			return wait;
		__sync_fetch_and_add(&wait->claims, -1);
	}
	return 0;
}

/* Records the thread that holds a lock, if the lock stores its owner. */
INLINE void note_holder(const struct config *options, struct lock_wait *wait, u64 lock, u32 flags)
{
	u64 owner = 0, offset = 0;

	wait->holder = 0;
	if (flags & LOCK_MUTEX)
		offset = lock_layout.mutex_owner;
	else if (flags == LOCK_READ || flags == LOCK_WRITE)
		offset = lock_layout.rwsem_owner;
	if (!offset || READ_KERNEL(owner, lock + offset - 1))
		return;
	if (!(flags & LOCK_MUTEX) && owner & RWSEM_READER_OWNED)
		return;
	owner &= ~(u64)OWNER_FLAGS;
	if (!owner || READ_KERNEL(wait->holder, owner + lock_layout.pid))
		return;
	READ_KERNEL(wait->holder_comm, owner + options->comm_offset);
}

PROGRAM("raw_tp") int kprofiler_lock_begin(u64 *ctx)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), flags = ctx[1];
	u64 task = bpf_get_current_task(), lock = ctx[0];
	const u64 *is_traced = LOOKUP(traced_cpus, &cpu);
	struct lock_line *line = LOOKUP(lock_lines, &cpu);
	struct lock_bucket *bucket = find_lock_bucket(task, lock);
	const struct config *options = LOOKUP(config, &zero);
	struct lock_wait *wait;

	if (!is_traced || !*is_traced || !line || !bucket || !options)
		return 0;
	wait = find_lock_wait(bucket, task, lock);
	if (wait) {
		/* A mutex fires contention_begin again when a spinning task goes to sleep. */
		if (flags & LOCK_MUTEX)
			return 0;
		line->unended++;
	} else {
		wait = claim_lock_wait(bucket);
	}
	if (!wait) {
		line->no_room++;
		return 0;
	}
	wait->lock = lock;
	wait->flags = flags;
	note_holder(options, wait, lock, flags);
	wait->task = task;
	wait->begun_ns = bpf_ktime_get_ns();
	return 0;
}

/*
 * Selects a wait with probability duration / threshold; returns the sample's value, or 0. The
 * sum over samples is an unbiased estimate of the total. If the sampling rate has been exceeded
 * since user space chose the threshold, a higher threshold applies.
 */
INLINE u64 choose_lock_wait(struct lock_line *line, u64 duration_ns, u64 now)
{
	u32 zero = 0;
	const struct lock_config *c = LOOKUP(lock_config, &zero);
	u64 threshold, duration;

	if (!c || !c->threshold_ns)
		return 0;
	threshold = raise_threshold(&line->budget, c->threshold_ns, c->sample_ns,
				    (u32)(c->threshold_ns >> UNIT_SHIFT), now);
	/* Randomly rounding the duration up or down preserves the mean. */
	duration = (duration_ns + (draw(&line->random) & ((1 << UNIT_SHIFT) - 1))) >> UNIT_SHIFT;
	if (!by_chance(&line->random, duration, threshold))
		return 0;
	line->budget.next_sample_ns += c->sample_ns;
	threshold <<= UNIT_SHIFT;
	return duration_ns > threshold ? duration_ns : threshold;
}

/* Returns whether the current process is the profiler's. */
INLINE int is_own_process(void)
{
	struct namespace_ids ids = {};

	/* While a thread exits, its id can be read, but not its pid namespace. */
	if (lock_layout.own_inode == INITIAL_NAMESPACE)
		return bpf_get_current_pid_tgid() >> 32 == lock_layout.own_tgid;
	return !bpf_get_ns_current_pid_tgid(lock_layout.own_device, lock_layout.own_inode, &ids,
					    sizeof(ids)) &&
	       ids.tgid == lock_layout.own_tgid;
}

/* Counts a wait, and samples it if it is selected. `own` is 0 if the scratch memory is in use. */
INLINE void count_lock_wait(void *ctx, struct config *options, struct cpu_line *line,
			    struct lock_line *sums, struct scratch *own, u32 cpu,
			    const struct lock_wait *wait)
{
	int in_namespace, is_filtered = !!(options->flags & WAIT_FILTERS);
	u64 now = bpf_ktime_get_ns(), duration = now - wait->begun_ns, value;
	u32 flags = wait->flags & (LOCK_FLAGS - 1);
	struct record *record;
	enum written written;

	if (is_filtered && !own) {
		sums->skipped++;
		return;
	}
	if (is_filtered && !is_followed(options, &own->record, &in_namespace)) {
		line->target++;
		return;
	}
	sums->by_flags[flags].waits++;
	sums->by_flags[flags].total_ns += duration;
	value = choose_lock_wait(sums, duration, now);
	if (!value)
		return;
	if (!own) {
		line->missed++;
		return;
	}
	record = &own->record;
	begin_record(record, line, cpu);
	record->kind = FIRST_EVENT + lock_layout.number - 1;
	record->phase = LOCK_PHASE + flags;
	record->holder = wait->holder;
	record->value = value;
	is_followed(options, record, &in_namespace); /* sets the record's ids */
	record->start_time_ns = start_time(options);
	if (is_too_young(options, record->start_time_ns)) {
		line->age++;
		end_record(record, line);
		return;
	}
	written = write_thread(ctx, options, record, lock_layout.by, lock_layout.python,
			       in_namespace, &wait->holder_comm);
	if (written == NO_FRAMES) {
		line->empty++;
	} else {
		line->taken++;
		if (written == NO_ROOM)
			line->ring_full++;
	}
	end_record(record, line);
}

PROGRAM("raw_tp") int kprofiler_lock_end(u64 *ctx)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	u32 place = lock_layout.number * EVENT_LINES + cpu;
	u64 task = bpf_get_current_task(), lock = ctx[0];
	const u64 *is_traced = LOOKUP(traced_cpus, &cpu);
	struct lock_line *sums = LOOKUP(lock_lines, &cpu);
	struct lock_bucket *bucket = find_lock_bucket(task, lock);
	struct cpu_line *line = LOOKUP(cpu_lines, &place);
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct lock_wait *wait, ended;

	if (!sums || !bucket || !line || !options || !own)
		return 0;
	wait = find_lock_wait(bucket, task, lock);
	if (!wait) {
		/* Waits that begin while the CPU is not traced are left out on purpose. */
		sums->unmatched += is_traced && *is_traced;
		return 0;
	}
	ended.begun_ns = wait->begun_ns;
	ended.flags = wait->flags;
	ended.holder = wait->holder;
	ended.holder_comm = wait->holder_comm;
	wait->task = 0;
	__sync_fetch_and_add(&wait->claims, -1);
	if (is_own_process())
		return 0;
	if (!take_scratch(own))
		own = 0;
	count_lock_wait(ctx, options, line, sums, own, cpu, &ended);
	if (own)
		free_scratch(own);
	return 0;
}
