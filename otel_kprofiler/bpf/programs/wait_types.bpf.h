// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Settings, counters and state of the programs that follow threads off the CPU (wait.bpf.h). The
 * structs are read and written by waits.py; change both together.
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
};

enum {
	OWN_FRAMES = 2, /* the program, bpf_trace_run4(); of several tracers also __traceiter_*() */
	NOT_RUNNING = -3, /* -ESRCH: a stack of a thread that does not run */
	LIKELY_FACTOR = 2, /* how much longer than usual a wait may be and surely has a begin */
	USUAL_SHIFT = 4,   /* each shorter wait takes 1/16 off what is usual */
	BURST_NS = 1000000000, /* of begins: as many at once as in this time */
};

#define WAIT_FILTERS (ONLY_TARGETS | ONLY_COMMS | ONLY_CGROUPS)

struct wait_config {
	u64 state_offset; /* of task_struct.__state, or .state before 5.14 */
	u64 on_rq_offset; /* of task_struct.on_rq */
	u64 iowait_offset; /* of the byte of task_struct.in_iowait, and the bit in it */
	u64 iowait_mask;
	u64 throttled_offset; /* of task_struct.throttled, since 6.18; 0: there is none */
	u64 cfs_rq_offset;    /* of task_struct.se.cfs_rq; 0: there is none */
	u64 throttle_count_offset; /* of cfs_rq.throttle_count */
	u64 runtime_offset;	   /* of task_struct.se.sum_exec_runtime; 0: unknown */
	u64 picked_offset;	   /* likewise prev_sum_exec_runtime: when it came to a CPU */
	u64 epoch;	  /* 0: paused; after a pause another one */
	u64 threshold_ns; /* waits from this on are all sampled, below 2^32; 0: none are */
	u64 min_ns;	  /* shorter ones never are */
	u64 begin_ns;	  /* between two begins on a CPU, on average, at least */
	u64 wakers;	  /* whether they are noted */
};

/*
 * Two cache lines for each CPU; only that CPU writes them, user space reads the first by mmap.
 */
struct wait_line {
	u64 taken;
	u64 ring_full;
	u64 no_room; /* waits of threads that found no place in `threads` */
	u64 missed;  /* switches that the kernel did not tell */
	u64 lost;    /* threads that ended, whose totals found no place in the ring */
	u64 begun;
	u64 reserved[2];
	u64 task; /* that came last; 0: unknown */
	u64 switched_ns; /* when that was */
	u64 epoch;
	u64 next_begin_ns;
	u64 more[4];
};

/* A thread that was off the CPU, and its sums. Times are of CLOCK_MONOTONIC. */
struct thread {
	u64 id;		   /* never used again, as task and thread ids are */
	u64 task;	   /* address of its task_struct */
	u64 start_time_ns; /* of the process, CLOCK_BOOTTIME; 0: unknown */
	u64 off_since_ns;  /* 0: it is on a CPU */
	u64 woken_ns;	   /* 0: it was not yet, or did not sleep */
	u64 total_ns[WAIT_STATES];
	u64 waits;    /* that have ended */
	u64 below_ns; /* in those that are too short to be sampled */
	u32 usual_ns; /* of its longer sleeps of late; 0: unknown */
	u32 usual_preempted_ns; /* likewise of waits for a CPU after preemptions */
	u32 tgid;     /* as in records */
	u32 tid;
	u32 initial_tid; /* in the initial namespace */
	u32 state;	 /* in which it is off the CPU */
	u32 epoch;	 /* in which it went */
	u32 cpu;	 /* on which it came last */
	/* of this wait */
	u32 threshold_ns;
	u32 likely_ns; /* its begin was told with the chance likely_ns / threshold_ns */
	u32 flags;     /* enum wait_flags */
	u32 waker_tgid;
	u32 waker_tid;
	u32 in_namespace;
	char waker_comm[16];
};

struct wait_end {
	u64 since_ns;
	u64 asleep_ns;	 /* in `state` */
	u64 runnable_ns; /* afterwards */
	u32 threshold_ns;
	u32 state;
	u32 flags;
	u32 waker_tgid;
	u32 waker_tid;
	u32 reserved;
	char waker_comm[16];
};

/* Keys are addresses of task_struct: nothing of a task has to be read to find it. */
HASH_OF(threads, u64, struct thread, SIZED_BY_LOADER);
MMAP_ARRAY(wait_config, struct wait_config, 1); /* changed without a system call */
MMAP_ARRAY(wait_lines, struct wait_line, SIZED_BY_LOADER);
SCRATCH(new_thread, struct thread);
