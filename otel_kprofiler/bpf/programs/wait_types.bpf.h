// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Settings, counters and state of the programs that follow threads off the CPU (wait.bpf.h). The
 * structs are read and written by wait_maps.py; change both together.
 */
#pragma once

#include "loaders.bpf.h"

/* As in model/wait.py. */
enum wait_states {
	RUNNABLE,
	INTERRUPTIBLE,
	UNINTERRUPTIBLE,
	STOPPED,
	IDLE_WAIT,
	WAIT_STATES,
};

/* States of a task: ABI of tools that read /proc, include/linux/sched.h. */
enum task_states {
	TASK_INTERRUPTIBLE = 0x1,
	TASK_UNINTERRUPTIBLE = 0x2,
	TASK_STOPPED = 0x4,
	TASK_TRACED = 0x8,
	TASK_PARKED = 0x40,
	TASK_DEAD = 0x80,
	TASK_WAKING = 0x200, /* the waker was faster than the tracepoint */
	TASK_NOLOAD = 0x400,
	TASK_RTLOCK_WAIT = 0x1000,
	TASK_FROZEN = 0x8000,
};

/* What a record of kind OFF_CPU tells. */
enum wait_phases {
	WAIT_BEGUN = 1, /* a thread left its CPU: all that a sample has; `value` is `since_ns` */
	WAIT_ENDED,	/* struct wait_end and, if it has not begun, the kernel stack */
	THREAD_ENDED,	/* struct thread */
};

enum wait_flags {
	WAIT_HAS_BEGUN = 1, /* there is a record of its begin */
	WAIT_KEPT = 2,	    /* it is sampled */
	WAIT_IOWAIT = 4,
	WAIT_THROTTLED = 8,
	WAIT_WOKEN = 16,    /* the waker is known */
	WAIT_UNWRITTEN = 32, /* its begin was chosen, but not written */
};

enum {
	NOT_RUNNING = -3, /* -ESRCH: a stack of a thread that does not run */
	LIKELY_FACTOR = 2, /* how much longer than usual a wait may be and surely has a begin */
	USUAL_SHIFT = 4,   /* each shorter wait takes 1/16 off what is usual */
	BURST_NS = 1000000000, /* of begins and samples: as many at once as in this time */
	UNIT_SHIFT = 8, /* thresholds have units of 256 ns: 32 bits hold 18 minutes */
	SAMPLES_PER_STEP = 4, /* beyond a burst, so many samples double the threshold */
	MOST_STEPS = 31,
	WAIT_EIGHTHS = 6, /* of the ring, at most, are for waits: the rest is for what runs */
	ENDED_EIGHTHS = 7, /* and so many for them and for threads that ended */
	SET_EVERY_NS = 16000000, /* the clocks drift apart by less than 10 us in this time */
};

#define WAIT_FILTERS (ONLY_TARGETS | ONLY_COMMS | ONLY_CGROUPS)

/*
 * Offsets in the kernel's structs, constant when a program is loaded: with them a member of a task
 * that the tracepoint tells is read without a helper. 0: unknown, or not there.
 */
struct wait_layout {
	u64 pid; /* of task_struct, as the others that name no struct */
	u64 state; /* __state, or .state before 5.14 */
	u64 on_rq;
	u64 iowait; /* the byte of in_iowait, and the bit in it */
	u64 iowait_mask;
	u64 throttled;	    /* since 6.18 */
	u64 cfs_rq;	    /* se.cfs_rq */
	u64 throttle_count; /* of cfs_rq */
	u64 runtime;	    /* se.sum_exec_runtime */
	u64 picked;	    /* likewise prev_sum_exec_runtime: when it came to a CPU */
	u64 run_delay;	    /* sched_info.run_delay: nanoseconds in run queues; 0: not accounted */
	u64 queued;	    /* sched_info.last_queued: since when it is in one; 0: in none */
	u64 rq;		    /* of cfs_rq */
	u64 clock;	    /* of rq: the clock of these times */
	u64 bucket_mask;    /* number of buckets, less 1 */
};

const volatile struct wait_layout wait_layout SECTION(".rodata.waits");

struct wait_config {
	u64 epoch;	  /* 0: paused; after a pause another one */
	u64 threshold_ns; /* waits from this on are all sampled; whole units; 0: none are */
	u64 min_ns;	  /* shorter ones never are */
	u64 begin_ns;	  /* between two begins on a CPU, on average, at least */
	u64 wakers;	  /* whether they are noted */
	u64 sample_ns;	  /* between two samples on a CPU, on average */
	u64 late_begins;  /* how many the next iteration may write, which counts down */
};

/*
 * Three cache lines for each CPU; only that CPU writes them, user space reads the first by mmap.
 */
struct wait_line {
	u64 taken;
	u64 ring_full;
	u64 no_room; /* waits of threads that found no place in `threads` */
	u64 missed;  /* switches that the kernel did not tell */
	u64 lost;    /* threads that ended, whose totals found no place in the ring */
	u64 begun;
	u64 offset_ns; /* CLOCK_MONOTONIC less the clock of threads */
	u64 set_ns;    /* when it was set, by the latter; 0: it is the former */
	u64 task; /* that came last; 0: unknown */
	u64 place; /* of its thread; NO_THREAD: it is not followed, or not known yet */
	u64 switched_ns; /* when that was */
	u64 epoch;
	u64 next_begin_ns;
	u64 random;
	u64 waking; /* the task that is woken */
	u64 next_sample_ns; /* ahead of now: more were taken than wanted since the threshold changed */
	u64 sampled_from_ns; /* the threshold at which that was counted */
	u64 more[7];
};

/*
 * A thread that was off the CPU, and its sums. Times are of the scheduler's clock (rq_clock(),
 * kernel/sched/sched.h); of CLOCK_MONOTONIC where that cannot be read. The first cache line has what
 * every switch needs, the second also what its wait adds to.
 */
struct thread {
	u64 task;	  /* address of its task_struct */
	u64 off_since_ns; /* 0: it is on a CPU */
	u64 run_delay_ns; /* of its task when it went */
	u32 initial_tid;  /* in the initial namespace */
	u32 state;	  /* in which it is off the CPU */
	u32 epoch;	  /* in which it went */
	u32 cpu;	  /* on which it came last */
	u32 flags;	  /* enum wait_flags, of this wait */
	u32 threshold; /* of this wait; in units, as the next three */
	u32 likely;    /* its begin was chosen with the chance likely / threshold */
	u32 usual;     /* duration of its longer sleeps of late; 0: unknown */
	u32 usual_preempted; /* of its waits for a CPU after preemptions */
	u32 claims;		/* on this place; 1 once it is taken */

	u64 total_ns[WAIT_STATES];
	u64 waits;	   /* that have ended */
	u64 below_ns;	   /* in those that are too short to be sampled */
	u64 start_time_ns; /* of the process, CLOCK_BOOTTIME; 0: unknown */

	u64 id;	      /* never used again, as task and thread ids are */
	u64 woken_ns; /* since when it wants a CPU, if that is known and not before off_since_ns */
	u32 tgid;     /* as in records */
	u32 tid;
	u32 in_namespace;
	u32 waker_tgid; /* of this wait */
	u32 waker_tid;
	u32 ran_ns; /* low bits of the CPU time of its task when the begin of this wait was written */
	u64 begun_ns; /* CLOCK_MONOTONIC when the begin of this wait was written; 0: another clock's */
	char waker_comm[16];
};

struct wait_end {
	u64 since_ns;
	u64 asleep_ns;	 /* in `state` */
	u64 runnable_ns; /* afterwards */
	u64 threshold_ns;
	u32 state;
	u32 flags;
	u32 waker_tgid;
	u32 waker_tid;
	char waker_comm[16];
};

/*
 * Where the threads of tasks are in `threads`: a task's hash chooses the bucket, whose places follow
 * each other there. The kernel's hash tables cost several times as much at a switch.
 */
enum {
	PLACES = 16,
	NO_THREAD = -1,
};

struct bucket {
	u64 tasks[PLACES]; /* 0: free */
};

MMAP_ARRAY(buckets, struct bucket, SIZED_BY_LOADER);
MMAP_ARRAY(threads, struct thread, SIZED_BY_LOADER);
MMAP_ARRAY(wait_config, struct wait_config, 1); /* changed without a system call */
MMAP_ARRAY(wait_lines, struct wait_line, SIZED_BY_LOADER);
