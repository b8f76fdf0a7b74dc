// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Settings, counters and state of the programs that track off-CPU threads (wait.bpf.h).
 * wait_maps.py reads and writes the structs; change both together.
 */
#pragma once

#include "loaders.bpf.h"

/* Same as in model/wait.py. */
enum wait_states {
	RUNNABLE,
	INTERRUPTIBLE,
	UNINTERRUPTIBLE,
	STOPPED,
	IDLE_WAIT,
	WAIT_STATES,
};

/* Task states, from include/linux/sched.h; tools that read /proc rely on the values. */
enum task_states {
	TASK_INTERRUPTIBLE = 0x1,
	TASK_UNINTERRUPTIBLE = 0x2,
	TASK_STOPPED = 0x4,
	TASK_TRACED = 0x8,
	TASK_PARKED = 0x40,
	TASK_DEAD = 0x80,
	TASK_WAKING = 0x200, /* the task was woken before the sched_switch tracepoint ran */
	TASK_NOLOAD = 0x400,
	TASK_RTLOCK_WAIT = 0x1000,
	TASK_FROZEN = 0x8000,
};

/* The event that a record of kind OFF_CPU reports. */
enum wait_phases {
	WAIT_BEGUN = 1, /* a thread left its CPU; like a sample, but `value` contains `since_ns` */
	WAIT_ENDED,	/* struct wait_end, plus the kernel stack if the start was not written */
	THREAD_ENDED,	/* struct thread */
};

enum wait_flags {
	WAIT_HAS_BEGUN = 1, /* the start of the wait was recorded */
	WAIT_KEPT = 2,	    /* the wait is sampled */
	WAIT_IOWAIT = 4,
	WAIT_THROTTLED = 8,
	WAIT_WOKEN = 16,    /* the waker is known */
	WAIT_UNWRITTEN = 32, /* the wait's start was selected, but not written */
};

enum {
	NOT_RUNNING = -3, /* -ESRCH, in place of a stack size: the thread is not running */
	LIKELY_FACTOR = 2, /* a wait's start is reported as if the wait would last twice the usual duration */
	USUAL_SHIFT = 4,   /* the maximum duration decays by 1/16 per wait */
	BURST_NS = 1000000000, /* a burst holds up to one second's worth of starts or samples */
	UNIT_SHIFT = 8, /* thresholds are in units of 256 ns: 32 bits hold 18 minutes */
	SAMPLES_PER_STEP = 4, /* after this many samples in excess of a burst, the threshold doubles */
	MOST_STEPS = 31,
	WAIT_EIGHTHS = 6, /* wait records may fill this many eighths of the ring */
	ENDED_EIGHTHS = 7, /* number of eighths of the ring that records of exited threads may fill */
	SET_EVERY_NS = 16000000, /* the clocks drift apart by less than 10 us in this interval */
};

#define WAIT_FILTERS (ONLY_TARGETS | ONLY_COMMS | ONLY_CGROUPS)

/*
 * Offsets in kernel structs; 0 if unknown or absent. The offsets are constants in the loaded
 * program, so that it can read members of the tracepoint's task without a helper.
 */
struct wait_layout {
	u64 pid; /* offsets in task_struct, unless a comment names another struct */
	u64 state; /* __state, or .state before 5.14 */
	u64 on_rq;
	u64 iowait; /* the byte that contains the in_iowait bit, which iowait_mask selects */
	u64 iowait_mask;
	u64 throttled;	    /* since 6.18 */
	u64 cfs_rq;	    /* se.cfs_rq */
	u64 throttle_count; /* in cfs_rq */
	u64 runtime;	    /* se.sum_exec_runtime */
	u64 picked;	    /* se.prev_sum_exec_runtime: runtime when the task was switched in */
	u64 run_delay;	    /* sched_info.run_delay: nanoseconds in run queues; 0: not counted */
	u64 queued;	    /* sched_info.last_queued: when the task was queued; 0: not queued */
	u64 rq;		    /* in cfs_rq */
	u64 clock;	    /* in struct rq: the scheduler's clock */
	u64 bucket_mask;    /* number of buckets minus 1 */
};

const volatile struct wait_layout wait_layout SECTION(".rodata.waits");

struct wait_config {
	u64 epoch;	  /* number of the current epoch, which begins after a pause; 0: paused */
	u64 threshold_ns; /* all longer waits are sampled; a multiple of 256 ns; 0: no sampling */
	u64 min_ns;	  /* shorter waits are never sampled */
	u64 begin_ns;	  /* minimum average interval between reported starts on a CPU */
	u64 wakers;	  /* whether to record wakers */
	u64 sample_ns;	  /* average interval between samples on a CPU */
	u64 late_begins;  /* number of late starts that may still be written; counts down */
};

/* Limits the sampling rate on a CPU. */
struct sample_budget {
	u64 next_sample_ns; /* time when the next sample is due; in the future if the rate was exceeded */
	u64 sampled_from_ns; /* the threshold for which `next_sample_ns` was computed */
};

/*
 * Each CPU has three cache lines, which only that CPU writes. User space maps the first cache line.
 */
struct wait_line {
	u64 taken;
	u64 ring_full;
	u64 no_room; /* waits by threads without an entry in `threads` */
	u64 missed;  /* context switches whose tracepoint event was missed */
	u64 lost;    /* exited threads whose totals did not fit in the ring */
	u64 begun;
	u64 offset_ns; /* CLOCK_MONOTONIC minus struct thread's clock */
	u64 set_ns;    /* when the offset was set (on struct thread's clock); 0: not set */
	u64 task; /* the last task switched in on this CPU; 0: unknown */
	u64 place; /* the task's index in `threads`; NO_THREAD: not tracked, or not known yet */
	u64 switched_ns; /* when the task was switched in */
	u64 epoch;
	u64 next_begin_ns;
	u64 random;
	u64 waking; /* the task being woken */
	struct sample_budget budget;
	u64 more[7];
};

/*
 * A thread that has left a CPU at least once, and its wait totals. Times are on the
 * scheduler's clock (rq_clock(), kernel/sched/sched.h), or on CLOCK_MONOTONIC where that clock
 * cannot be read. The first cache line contains the members used at every context switch; the
 * second contains the members updated for each wait.
 */
struct thread {
	u64 task;	  /* address of the thread's task_struct */
	u64 off_since_ns; /* when the thread left the CPU; 0: it is on a CPU */
	u64 run_delay_ns; /* the task's run delay when the thread left the CPU */
	u32 initial_tid;  /* thread id in the initial namespace */
	u32 state;	  /* the thread's state when it left the CPU */
	u32 epoch;	  /* value of wait_config.epoch when the thread left the CPU */
	u32 cpu;	  /* the last CPU that the thread ran on */
	u32 flags;	  /* flags for this wait (enum wait_flags) */
	u32 threshold; /* threshold of this wait; like the next three members, in units of 256 ns */
	u32 likely;    /* the wait's start was selected with probability likely / threshold */
	u32 usual;     /* decaying maximum of the thread's sleep durations; 0: unknown */
	u32 usual_preempted; /* decaying maximum of the thread's run queue waits after preemption */
	u32 claims;		/* number of CPUs that claim this entry; 1 while in use */

	u64 total_ns[WAIT_STATES];
	u64 waits;	   /* number of completed waits */
	u64 below_ns;	   /* time in waits too short to be sampled */
	u64 start_time_ns; /* start of the process, on CLOCK_BOOTTIME; 0: unknown */

	u64 id;	      /* never reused, unlike task addresses and thread ids */
	u64 woken_ns; /* when the thread became runnable; stale if earlier than off_since_ns */
	u32 tgid;     /* same ids as in records */
	u32 tid;
	u32 in_namespace;
	u32 waker_tgid; /* ids of the thread that ended this wait */
	u32 waker_tid;
	u32 ran_ns; /* low bits of the task's CPU time when the start of this wait was written */
	u64 begun_ns; /* CLOCK_MONOTONIC when the start of this wait was recorded; 0: not measured */
	char waker_comm[16];
};

struct wait_end {
	u64 since_ns;
	u64 asleep_ns;	 /* time off the CPU in `state` */
	u64 runnable_ns; /* time spent runnable, waiting for a CPU */
	u64 threshold_ns;
	u32 state;
	u32 flags;
	u32 waker_tgid;
	u32 waker_tid;
	char waker_comm[16];
};

/*
 * Maps tasks to indices in `threads`: a task's hash selects a bucket, whose entries in `threads`
 * are adjacent. A BPF hash map would take several times as long per context switch.
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
MMAP_ARRAY(wait_config, struct wait_config, 1); /* written by user space without a system call */
MMAP_ARRAY(wait_lines, struct wait_line, SIZED_BY_LOADER);
