// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Dumps threads, including sleeping threads: a task iterator writes a row for each thread of the
 * target processes, and writes the thread's stacks to the ring in the sampler's record format. The
 * sampler's code collects the stacks (other_task.bpf.h).
 *
 * The stacks of a sleeping thread do not change. A thread slept during the whole read if its
 * context switch count is unchanged after the read and it is not on a CPU.
 */

#define KPROFILER_OTHER_TASK
#include "other_task.bpf.h"
#include "sampler.bpf.c"

enum {
	MOST_TRIES = 512, /* addresses tried per run: the verifier limits the number of branches */
	MAX_NAMESPACES = 32, /* MAX_PID_NS_LEVEL */
	BYTE_OFFSET = 0, /* enum bpf_field_info_kind */
	BYTE_SIZE = 1,
	FIELD_EXISTS = 2,
	LEFT_SHIFT = 4,
	RIGHT_SHIFT = 5,
	COMM_BYTES = 16,
};

enum row_flags {
	HAS_STACKS = 1,
	ON_A_CPU = 2,	/* no stacks, because the thread ran while they were being read */
	NO_RING = 4,	/* no stacks, because the ring was full */
	IN_IOWAIT = 8,
};

/* dump.py parses this struct. Scheduler clocks and boottime have different origins. */
struct dump_row {
	u64 time_ns;	  /* boottime */
	u64 monotonic_ns; /* value of CLOCK_MONOTONIC at `time_ns` */
	u64 clock_ns;	  /* the scheduler's clock, as last read on the CPU that runs this program */
	u64 arrived_ns;	  /* when the thread was last switched in; 0: unknown */
	u64 ran_ns;	  /* run time since `arrived_ns`, excluding interrupts and stolen time */
	u64 ran_until_ns; /* time of last run, on a clock excluding interrupts and stolen time */
	u64 lacking_ns;	  /* how far the clock of ran_until_ns lags behind the scheduler's clock */
	u64 queued_ns;	  /* when the thread was queued for a CPU; 0: it is not queued */
	u64 switches;	  /* context switches of the thread since it started */
	u64 state;
	u32 tgid;
	u32 tid;
	u32 flags;
	s32 cpu; /* the thread's last CPU; -1: unknown */
	u8 comm[COMM_BYTES];
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct kernfs_node___dump {
	u64 id;
};

struct cgroup___dump {
	struct kernfs_node___dump *kn;
};

struct css_set___dump {
	struct cgroup___dump *dfl_cgrp;
};

struct rq___dump {
	u64 clock;
	u64 clock_task;
};

struct cfs_rq___dump {
	struct rq___dump *rq;
};

struct sched_entity___dump {
	u64 exec_start;
	u64 sum_exec_runtime;
	u64 prev_sum_exec_runtime;
	struct cfs_rq___dump *cfs_rq;
};

struct sched_info___dump {
	u64 last_arrival;
	u64 last_queued;
};

struct mm_struct___dump {
	void *pgd;
};

struct upid___dump {
	int nr;
	struct {
		struct {
			unsigned int inum;
		} ns;
	} * ns;
};

struct task_struct___dump {
	unsigned int __state; /* 5.14 */
	int on_cpu;
	int exit_state;
	int wake_cpu;
	int pid;
	int tgid;
	u8 comm[COMM_BYTES];
	unsigned long nvcsw;
	unsigned long nivcsw;
	unsigned int in_iowait : 1;
	struct mm_struct___dump *mm;
	struct pid *thread_pid;
	struct task_struct___dump *group_leader;
	struct css_set___dump *cgroups;
	struct sched_entity___dump se;
	struct sched_info___dump sched_info;
};

struct task_struct___old {
	long state;
};

struct pid_namespace___dump {
	struct {
		unsigned int inum;
	} ns;
};

struct pid___dump {
	unsigned int level;
	struct upid___dump numbers[1];
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};
#pragma clang attribute pop

#define HAS(member) __builtin_preserve_field_info(member, FIELD_EXISTS)
#define BIT_FIELD(member, kind) __builtin_preserve_field_info(member, kind)
#define GET(into, member) bpf_probe_read_kernel(&(into), sizeof(into), &(member))

SCRATCH(dump_rows, struct dump_row);

/*
 * Finds the task's tgid and tid in the profiler's pid namespace. Returns 0 if the task is not in
 * that namespace.
 */
INLINE int find_ids(const struct config *options, const struct task_struct___dump *task,
		    struct dump_row *row)
{
	struct task_struct___dump *leader = 0;
	struct pid___dump *pid = 0, *leader_pid = 0;
	u32 level = 0, inum = 0, tgid = 0, tid = 0;

	GET(row->tgid, task->tgid);
	GET(row->tid, task->pid);
	if (!(options->flags & NAMESPACE))
		return 1;
	GET(leader, task->group_leader);
	GET(pid, task->thread_pid);
	GET(leader_pid, leader->thread_pid);
	GET(level, pid->level);
#pragma clang loop unroll(disable)
	for (u32 i = 0; i <= MAX_NAMESPACES && i <= level; i++) {
		const struct upid___dump *number = &pid->numbers[0], *of_leader = &leader_pid->numbers[0];
		u64 at = i * sizeof(struct upid);
		struct pid_namespace___dump *space = 0;

		READ_KERNEL(space, (u64)number + at + 8);
		GET(inum, space->ns.inum);
		if (inum != options->namespace_inode)
			continue;
		READ_KERNEL(tid, (u64)number + at);
		READ_KERNEL(tgid, (u64)of_leader + at);
		row->tid = tid;
		row->tgid = tgid;
		return 1;
	}
	return 0;
}

INLINE u64 count_switches(const struct task_struct___dump *task)
{
	unsigned long own = 0, preempted = 0;

	GET(own, task->nvcsw);
	GET(preempted, task->nivcsw);
	return own + preempted;
}

INLINE int is_on_cpu(const struct task_struct___dump *task)
{
	int on = 0;

	if (HAS(task->on_cpu)) /* without CONFIG_SMP, this program occupies the only CPU */
		GET(on, task->on_cpu);
	return on;
}

INLINE struct rq___dump *find_queue(const struct task_struct___dump *task)
{
	struct cfs_rq___dump *fair = 0;
	struct rq___dump *queue = 0;

	if (HAS(task->se.cfs_rq)) { /* CONFIG_FAIR_GROUP_SCHED */
		GET(fair, task->se.cfs_rq);
		GET(queue, fair->rq);
	}
	return queue;
}

INLINE void note_times(const struct task_struct___dump *task, struct dump_row *row)
{
	struct rq___dump *queue = find_queue((void *)get_own_task());
	u64 clock = 0, busy = 0, before = 0;

	row->clock_ns = row->arrived_ns = row->queued_ns = 0;
	GET(row->clock_ns, queue->clock);
	row->monotonic_ns = bpf_ktime_get_ns();
	row->time_ns = bpf_ktime_get_boot_ns();
	GET(row->ran_until_ns, task->se.exec_start);
	GET(row->ran_ns, task->se.sum_exec_runtime);
	GET(before, task->se.prev_sum_exec_runtime);
	row->ran_ns -= before;
	if (HAS(task->sched_info.last_queued)) { /* CONFIG_SCHED_INFO */
		GET(row->arrived_ns, task->sched_info.last_arrival);
		GET(row->queued_ns, task->sched_info.last_queued);
	}
	queue = find_queue(task);
	GET(clock, queue->clock);
	GET(busy, queue->clock_task);
	row->lacking_ns = clock - busy;
}

INLINE void note_state(const struct task_struct___dump *task, struct dump_row *row)
{
	u64 bits = 0;
	long old = 0;
	u32 state = 0;
	int dead = 0;

	if (HAS(task->__state)) {
		GET(state, task->__state);
		row->state = state;
	} else {
		GET(old, ((const struct task_struct___old *)task)->state);
		row->state = old;
	}
	GET(dead, task->exit_state);
	row->state |= dead;
	GET(row->comm, task->comm);
	row->cpu = -1;
	if (HAS(task->wake_cpu)) /* exists only with CONFIG_SMP; also set by __set_task_cpu() */
		GET(row->cpu, task->wake_cpu);
	bpf_probe_read_kernel(&bits, BIT_FIELD(task->in_iowait, BYTE_SIZE),
			      (u8 *)task + BIT_FIELD(task->in_iowait, BYTE_OFFSET));
	bits <<= BIT_FIELD(task->in_iowait, LEFT_SHIFT);
	row->flags = bits >> BIT_FIELD(task->in_iowait, RIGHT_SHIFT) ? IN_IOWAIT : 0;
}

/* Discards everything read from the previous task. */
INLINE void begin_other(struct other *own, u64 task)
{
	struct mm_struct___dump *mm = 0;

	own->task = task;
	own->table = 0;
	GET(mm, ((const struct task_struct___dump *)task)->mm);
	GET(own->table, mm->pgd);
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < KEPT_PAGES; i++)
		own->kept[i].at = 0;
}

/* Collects the user stack of another task; otherwise like collect_user_stack. */
INLINE u64 collect_other_user(const struct config *options, struct record *record,
			      struct other *own, u8 *at, u64 limit)
{
	struct unwind_work *w = get_work();
	u64 bytes = 0;

	if (!w || !(options->flags & USER_STACKS))
		return 0;
	w->tgid = record->tgid;
	w->tid = record->tid;
	w->cpu = record->cpu;
	w->time_ns = record->time_ns;
	w->max_frames = limit / 8;
	w->user_registers = own->registers;
	if (!unwind())
		bytes = copy_stack(w, at);
	record->user_bytes = bytes;
	return bytes;
}

/* Collects the other task's Python frames, as write_thread does for the current task. */
INLINE u64 collect_other_python(struct record *record, u64 behind)
{
	u64 bytes;

	if (!begins_python(0, record))
		return 0;
	bytes = collect_python_stack(behind);
	BOUND(bytes, PYTHON_STACK_BYTES - 8);
	if (bytes)
		record->python_bytes = bytes;
	return bytes;
}

/* Writes the stacks of a sleeping thread to the ring. */
INLINE void write_stacks(struct task_struct *kernel_task, const struct config *options,
			 struct record *record, struct other *own, struct dump_row *row, int python)
{
	const struct task_struct___dump *task = (void *)kernel_task;
	u64 limit = stack_bytes(options->stack_bytes), kernel_bytes, user_bytes, python_bytes = 0;
	u64 context_bytes = 0, switches = row->switches;
	struct css_set___dump *groups = 0;
	struct cgroup___dump *group = 0;
	struct kernfs_node___dump *node = 0;
	long result;

	record->time_ns = row->time_ns;
	record->tgid = row->tgid;
	record->tid = row->tid;
	record->start_time_ns = start_time(options);
	record->kernel_bytes = record->user_bytes = record->python_bytes = NOT_COLLECTED;
	result = get_sleeping_stack(kernel_task, record->frames, limit, switches != 0);
	record->kernel_bytes = result;
	kernel_bytes = stack_bytes(result);
	user_bytes = collect_other_user(options, record, own, (u8 *)record->frames + kernel_bytes,
					limit);
	if (python)
		python_bytes = collect_other_python(record, kernel_bytes + user_bytes);
	note_program(options, record, own->task);
	record->cgroup_id = 0;
	GET(groups, task->cgroups);
	GET(group, groups->dfl_cgrp);
	GET(node, group->kn);
	GET(record->cgroup_id, node->id);
	GET(record->comm, task->comm);
	record->span.trace_id[0] = record->span.trace_id[1] = record->span.span_id = 0;
	record->labels = 0;
	if (options->flags & THREAD_CONTEXTS && may_publish(record->tgid)) {
		context_bytes = collect_thread_context(kernel_bytes + user_bytes + python_bytes);
		BOUND(context_bytes, CONTEXT_MASK);
	}
	record->context_bytes = context_bytes;
	if (is_on_cpu(task) || count_switches(task) != switches) {
		row->flags |= ON_A_CPU;
		return;
	}
	if (RING_OUTPUT(ring, record,
			HEADER_BYTES + kernel_bytes + user_bytes + python_bytes + context_bytes,
			BPF_RB_NO_WAKEUP))
		row->flags |= NO_RING;
	else
		row->flags |= HAS_STACKS;
	if (python_bytes)
		describe_codes();
}

INLINE int dump(struct bpf_iter__task *context, enum user_frames by, int python)
{
	u32 zero = 0;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *scratch_memory = LOOKUP(scratch, &zero);
	struct dump_row *row = LOOKUP(dump_rows, &zero);
	struct other *own = get_other();
	struct unwind_config *layout = get_unwind_config();
	struct task_struct *task = context->task;
	struct record *record;
	u64 stack = 0;

	if (!task || !options || !scratch_memory || !row || !own || !layout)
		return 0;
	if (!find_ids(options, (void *)task, row) || !LOOKUP(targets, &row->tgid))
		return 0;
	record = &scratch_memory->record;
	record->kind = ON_CPU;
	record->phase = 0;
	record->value = 1;
	record->cpu = bpf_get_smp_processor_id();
	begin_other(own, (u64)task);
	own->ids = (u64)row->tgid << 32 | row->tid;
	if (by == BY_TABLES) {
		own->registers = bpf_task_pt_regs(task);
	} else if (!READ_KERNEL(stack, own->task + layout->task_stack)) {
		own->registers = stack + layout->stack_top_registers;
	}
	own->user_pc = 0;
	READ_KERNEL(own->user_pc, own->registers + layout->interrupt.pc_at);
	row->switches = count_switches((void *)task);
	note_state((void *)task, row);
	note_times((void *)task, row);
	if (is_on_cpu((void *)task))
		row->flags |= ON_A_CPU;
	else
		write_stacks(task, options, record, own, row, python);
	bpf_seq_write(context->meta->seq, row, sizeof(*row));
	return 0;
}

PROGRAM("iter/task") int kprofiler_dump(struct bpf_iter__task *context)
{
	return dump(context, BY_TABLES, 0);
}

PROGRAM("iter/task") int kprofiler_dump_python(struct bpf_iter__task *context)
{
	return dump(context, BY_TABLES, 1);
}

PROGRAM("iter/task") int kprofiler_dump_5_10(struct bpf_iter__task *context)
{
	return dump(context, BY_TABLES_5_10, 0);
}

PROGRAM("iter/task") int kprofiler_dump_5_10_python(struct bpf_iter__task *context)
{
	return dump(context, BY_TABLES_5_10, 1);
}

/*
 * Finds the start of the kernel's direct map, which contains the page table of the process that
 * runs this program, and starts at a multiple of 1 GiB (CONFIG_RANDOMIZE_MEMORY). Only with the
 * correct start is the word at `proof_at`, read through the direct map, equal to `proof`.
 */
PROGRAM("iter/task") int kprofiler_find_memory(struct bpf_iter__task *context)
{
	u32 zero = 0;
	struct memory_layout *layout = LOOKUP(memory_layout, &zero);
	struct other *own = get_other();
	struct task_struct *task = context->task;
	u64 first, at, word;

	if (!task || !layout || !own || layout->direct_map || (u64)task != get_own_task())
		return 0;
	begin_other(own, (u64)task);
	first = own->table & ~((1ULL << GIANT_BITS) - 1);
#pragma clang loop unroll(disable)
	for (u64 i = 0; i < MOST_TRIES; i++) {
		layout->direct_map = first - (layout->tried++ << GIANT_BITS);
		at = find_byte(layout->proof_at);
		if (at && !READ_KERNEL(word, at) && word == layout->proof)
			return 0;
		own->kept[layout->proof_at >> PAGE_BITS & (KEPT_PAGES - 1)].at = 0;
	}
	layout->direct_map = 0;
	return 0;
}
