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
	THREAD_ENDED = 3, /* struct thread follows */
};

#define WAIT_FILTERS (ONLY_TARGETS | ONLY_COMMS | ONLY_CGROUPS)

struct wait_config {
	u64 state_offset; /* of task_struct.__state, or .state before 5.14 */
	u64 on_rq_offset; /* of task_struct.on_rq */
	u64 epoch;	  /* 0: paused; after a pause another one */
};

/* One cache line for each CPU; only that CPU writes it, user space reads it by mmap. */
struct wait_line {
	u64 no_room; /* waits of threads that found no place in `threads` */
	u64 missed;  /* switches that the kernel did not tell */
	u64 lost;    /* threads that ended, whose totals found no place in the ring */
	u64 task;    /* that came last; 0: unknown */
	u64 switched_ns; /* when that was */
	u64 epoch;
	u64 reserved[2];
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
	u32 tgid;     /* as in records */
	u32 tid;
	u32 initial_tid; /* in the initial namespace */
	u32 state;	 /* in which it is off the CPU */
	u32 epoch;	 /* in which it went */
	u32 cpu;	 /* on which it came last */
};

/* Keys are addresses of task_struct: nothing of a task has to be read to find it. */
HASH_OF(threads, u64, struct thread, SIZED_BY_LOADER);
ARRAY(wait_config, struct wait_config, 1);
MMAP_ARRAY(wait_lines, struct wait_line, SIZED_BY_LOADER);
SCRATCH(new_thread, struct thread);
