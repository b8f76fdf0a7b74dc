// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The sampler: runs on every overflow of a perf event and writes one record to a ring.
 *
 * Uses only helpers: no kernel header, no kernel struct and no processor register, so that one
 * little-endian object supports every kernel since 5.10, on x86-64 and arm64. layout.py reads and
 * writes the structs below; change both together.
 */

#include "loaders.bpf.h"
#include "spans.bpf.h"
#include "frame_pointers.bpf.h"
#ifndef KPROFILER_BCC
#include "python_span.bpf.h"
#include "unwind.bpf.h"
#endif

enum {
	MAX_FRAMES = 127, /* frames per stack: the default of kernel.perf_event_max_stack */
	STACK_BYTES = MAX_FRAMES * 8, /* 0x3f8: a mask that preserves every possible length */
	PYTHON_STACK_BYTES = 2048, /* more than the largest stack; a power of two */
	MAX_CONTEXT_ATTRIBUTES = 612, /* OTEP 4947: a record has at most 640 bytes */
	CONTEXT_MASK = 1023,
	CONTEXT_BYTES = 1152, /* at least a record's head plus CONTEXT_MASK bytes of attributes */
	ALL_STACKS_BYTES = STACK_BYTES + USER_STACK_BYTES + PYTHON_STACK_BYTES,
	ALL_STACKS_MASK = 8191,
	NOT_COLLECTED = -32768,
	NO_OWNER = -1, /* never a user id, as in chown(2) */
	MAX_RANGES = 4,
	LONGEST_GAP_NS = 500000000, /* misses in gaps longer than this plus two periods are not counted */
	ON_CPU = 1, /* sample kind, as in model/kind.py */
	OFF_CPU = 2,
	IN_FLIGHT = 1, /* a record is being written; its time is not known yet */
	X86_PC = 128, /* offsets in struct pt_regs (arch/x86/include/uapi/asm/ptrace.h) */
	X86_SP = 152,
	A64_SP = 248, /* arch/arm64/include/uapi/asm/ptrace.h */
	A64_PC = 256,
};

enum flags {
	KERNEL_STACKS = 1,
	USER_STACKS = 2,
	KEEP_IDLE = 4,
	ONLY_TARGETS = 8,
	START_TIME = 16,
	SPAN_LINKS = 32,
	NAMESPACE = 64, /* ids are from the pid namespace that contains the targets */
	DESCENDANTS = 128, /* descendants of targets are also targets */
	A64 = 256,	   /* return addresses must follow arm64 call instructions */
	ONLY_COMMS = 512,
	ONLY_CGROUPS = 1024,
	PROGRAM_AND_OWNER = 2048, /* the fields in struct program_offsets can be read */
	THREAD_CONTEXTS = 4096,
	/* settings that may select or leave out the idle task */
	SELECTS = KEEP_IDLE | ONLY_TARGETS | NAMESPACE | ONLY_COMMS | ONLY_CGROUPS,
};

/* How the programs in this object collect user frames. */
enum user_frames {
	BY_FRAME_POINTERS,
	BY_TABLES,	/* registers from bpf_task_pt_regs */
	BY_TABLES_5_10, /* registers from the top of the kernel stack */
};

enum written {
	WRITTEN,
	NO_ROOM,
	NO_FRAMES,
};

struct range {
	u64 start;
	u64 size;
};

/* Offsets of fields that identify a task's program and user. */
struct program_offsets {
	u64 exec_id;	 /* of task_struct.self_exec_id */
	u64 mm;		 /* of task_struct.mm */
	u64 stack_start; /* of mm_struct.start_stack */
	u64 credentials; /* of task_struct.real_cred */
	u64 owner;	 /* of cred.euid */
};

struct config {
	u64 flags;
	u64 min_age_ns;
	u64 leader_offset; /* offset of task_struct.group_leader */
	u64 start_offset;  /* offset of task_struct.start_boottime */
	u64 wakeup_bytes;  /* bytes in the ring at which the reader is woken */
	u64 stack_bytes; /* size limit for a kernel or user stack, at most STACK_BYTES */
	u64 namespace_device; /* device of the pid namespace; its inode number follows */
	u64 namespace_inode;
	u64 parent_offset; /* offset of task_struct.real_parent */
	u64 tgid_offset;   /* offset of task_struct.tgid */
	u64 comm_offset;   /* offset of task_struct.comm; 0: unknown */
	u64 cgroup_levels; /* bit mask of hierarchy levels with selected cgroups */
	u64 period_ns;	   /* interval between runs of the program on a CPU; 0: irregular */
	u64 regular_since_ns; /* missing runs are counted from this time on */
	u64 thread_pointer; /* offset of task_struct.thread.fsbase, the user thread pointer */
	struct program_offsets program;
	struct span_layout spans;
	struct range interrupt_text[MAX_RANGES];
};

/*
 * Counters for one event on one CPU, in separate cache lines. Only that CPU writes the counters;
 * user space reads them through a mapping.
 */
struct cpu_line {
	u64 taken;
	u64 ring_full;
	u64 idle;      /* omitted: the idle task itself */
	u64 target;    /* omitted: not one of the selected processes, names or cgroups */
	u64 age;       /* omitted: the process is too young */
	u64 empty;     /* omitted: the only collected stack has no frames */
	u64 in_flight; /* time of the record being written; IN_FLIGHT: not yet known; 0: none */
	u64 missed;    /* runs that the kernel skipped while the CPU was not idle */
	u64 busy_ns;   /* time spent in this program */
	u64 counted;   /* event count at the last run; unused for cpu-clock */
	u64 overflows; /* number of event periods completed up to the last run */
	u64 skipped;   /* tracepoint events dropped because the scratch memory was in use */
	u64 unused[4];
};

/* struct bpf_pidns_info */
struct namespace_ids {
	u32 pid;
	u32 tgid;
};

struct comm {
	char name[16];
};

/* State of the ring reader; user space reads and writes it through a mapping. */
struct reader {
	u64 waits_since;  /* records of processes that started at or after this time wake the reader */
	u64 newest_start; /* latest process start time in the records */
};

struct record {
	u64 time_ns;
	u64 start_time_ns; /* 0: unknown */
	u64 cgroup_id;
	struct span span;
	u64 value; /* the unit depends on `kind` */
	u64 stack_start; /* start of the main stack, as in field 28 of /proc/PID/stat; 0: unknown */
	u32 tgid;
	u32 tid;
	u32 exec_id; /* incremented by execve(2), inherited by fork(2) */
	u32 owner;   /* effective user id; NO_OWNER: this and exec_id are unknown */
	u16 cpu;
	u16 kind;
	s16 kernel_bytes; /* size, a negative errno, or NOT_COLLECTED */
	s16 user_bytes;
	s16 python_bytes;
	u16 phase; /* wait phase, or lock flags (locks.bpf.h); 0 for other samples */
	u32 labels; /* number of the label set; 0: none */
	char comm[16];
	u32 context_bytes; /* size of the thread context (thread_context.bpf.h), after the stacks */
	u32 holder; /* tid of the lock's holder in the initial pid namespace; 0: unknown */
	/*
	 * The stacks (user_stack.bpf.h, python_types.bpf.h), the context and, for a lock, the name
	 * of its holder, stored contiguously.
	 */
	u64 frames[(ALL_STACKS_BYTES + CONTEXT_BYTES) / 8];
};

/* The sampler's last run on a CPU, from which missed runs are counted. */
struct last_run {
	u64 time_ns; /* time of the run; 0: the CPU was idle */
	s64 late_ns; /* total delay of the runs, minus the periods already counted as missed */
};

/* An interrupted instruction, and the stack pointer. */
struct position {
	u64 pc;
	u64 sp;
};

struct scratch {
	struct record record;
	struct last_run last;
	u64 is_taken; /* nonzero while a program uses this memory; set only with tracepoints */
	u64 idle; /* of the CPU's line, before the sample */
	struct position now; /* where the idle task is interrupted; pc is 0 for other tasks */
	struct position rest; /* where the idle task was last interrupted outside of interrupts */
};

#define HEADER_BYTES __builtin_offsetof(struct record, frames)

ARRAY(config, struct config, 1);
MMAP_ARRAY(cpu_lines, struct cpu_line, SIZED_BY_LOADER);
MMAP_ARRAY(reader, struct reader, 1);
SCRATCH(scratch, struct scratch);
RING(ring);

#ifndef KPROFILER_BCC
#include "python_frames.bpf.h"
#endif
#include "thread_context.bpf.h"
#include "events.bpf.h"

/*
 * Claims this CPU's scratch memory; returns 0 if an interrupted program is using it. The
 * kernel keeps perf event programs from interrupting each other, but not tracepoint programs: a
 * tracepoint may fire in an interrupt, or in a helper that a program calls, and a hardware event
 * (an NMI on x86) may interrupt the programs at sched_switch.
 */
INLINE int take_scratch(struct scratch *own)
{
	if (!MAY_NEST)
		return 1;
	if (*(volatile u64 *)&own->is_taken)
		return 0;
	*(volatile u64 *)&own->is_taken = 1;
	return 1;
}

INLINE void free_scratch(struct scratch *own)
{
	if (MAY_NEST)
		*(volatile u64 *)&own->is_taken = 0;
}

/*
 * Converts a helper's result to the length of a stack; 0 for errors. The mask proves the bounds to
 * the verifier on all kernel versions; the asm keeps the compiler from removing the mask.
 */
INLINE u64 stack_bytes(long result)
{
	u64 bytes = result < 0 ? 0 : result;

	asm volatile("%0 &= %1" : "+r"(bytes) : "i"(STACK_BYTES));
	return bytes;
}

#ifndef KPROFILER_BCC
/*
 * Like bpf_get_task_stack() for the kernel stack of a task that is off the CPU, but subtracts 1 from
 * the first frame, which is a return address. User space adjusts only the frames after the first.
 * A task that has never run starts at ret_from_fork, which is not a return address.
 */
INLINE long get_sleeping_stack(void *task, u64 *frames, u64 limit, int has_run)
{
	long result = bpf_get_task_stack(task, frames, limit, 0);

	if (result > 0 && has_run)
		frames[0]--;
	return result;
}
#endif

/*
 * Returns the CLOCK_BOOTTIME at which the current process (not the thread) started; 0 if
 * unreadable.
 */
INLINE u64 start_time(const struct config *options)
{
	u64 leader = 0, start = 0;
	u64 task = bpf_get_current_task();

	if (!(options->flags & START_TIME))
		return 0;
	if (bpf_probe_read_kernel(&leader, sizeof(leader), (void *)(task + options->leader_offset)))
		return 0;
	if (bpf_probe_read_kernel(&start, sizeof(start), (void *)(leader + options->start_offset)))
		return 0;
	return start;
}

/*
 * Records which program a task runs, and as which user. During execve(2), the start of the new
 * program's stack is still 0. An exiting process has no stack. exec_id is written atomically.
 */
INLINE void note_program(const struct config *options, struct record *record, u64 task)
{
	u64 mm = 0, cred = 0;

	record->stack_start = 0;
	record->exec_id = 0;
	record->owner = NO_OWNER;
	if (!(options->flags & PROGRAM_AND_OWNER) ||
	    READ_KERNEL(cred, task + options->program.credentials) ||
	    READ_KERNEL(record->owner, cred + options->program.owner)) {
		record->owner = NO_OWNER;
		return;
	}
	READ_KERNEL(record->exec_id, task + options->program.exec_id);
	if (!READ_KERNEL(mm, task + options->program.mm) && mm)
		READ_KERNEL(record->stack_start, mm + options->program.stack_start);
}

GLOBAL int is_interrupt_entry(u64 pc)
{
	u32 zero = 0;
	const struct config *options = LOOKUP(config, &zero);

	if (!options)
		return 0;
#pragma clang loop unroll(full)
	for (int i = 0; i < MAX_RANGES; i++) {
		const struct range *text = &options->interrupt_text[i];

		if (pc - text->start < text->size)
			return 1;
	}
	return 0;
}

/*
 * Returns whether an interrupt was being handled, that is, whether the stack contains a frame in
 * interrupt entry code.
 */
INLINE int in_interrupt(const struct record *record, u64 bytes)
{
#pragma clang loop unroll(disable)
	for (u32 frame = 0; frame < MAX_FRAMES && frame * 8 < bytes; frame++)
		if (is_interrupt_entry(record->frames[frame]))
			return 1;
	return 0;
}

#include "targets.bpf.h"

/*
 * Writes the user stack to `at`; returns the stack's size in bytes, or 0 if it cannot be collected.
 * Sets the record's `user_bytes` to this size, or to an error code.
 */
INLINE u64 collect_user_stack(void *ctx, const struct config *options, struct record *record,
			      u8 *at, u64 limit, enum user_frames by)
{
	u64 bytes = 0;
	long result;

#ifndef KPROFILER_BCC
	struct unwind_work *w = by == BY_FRAME_POINTERS ? 0 : get_work();

	if (w) {
		w->tgid = record->tgid;
		w->tid = record->tid;
		w->cpu = record->cpu;
		w->time_ns = record->time_ns;
		w->max_frames = limit / 8;
		w->user_registers =
			by == BY_TABLES ? bpf_task_pt_regs(bpf_get_current_task_btf()) : 0;
		if (!unwind())
			bytes = copy_stack(w, at);
		else if (w->end == END_32_BIT)
			w = 0;
	}
	if (w) {
		record->user_bytes = bytes;
		return bytes;
	}
#endif
	result = bpf_get_stack(ctx, at + sizeof(struct stack_head), limit, BPF_F_USER_STACK);
	/* A single frame at 0 belongs to a thread that the kernel runs for the process (io_uring). */
	if (result == 8 && !*(u64 *)(at + sizeof(struct stack_head)))
		result = 0;
	if (result <= 0) {
		record->user_bytes = result;
		return 0;
	}
	bytes = check_frames(at, stack_bytes(result), limit, options->flags & A64);
	record->user_bytes = bytes;
	return bytes;
}

#ifndef KPROFILER_BCC

/*
 * Writes the interrupted thread's span and labels into the record. Returns whether the
 * interpreter's objects contain a span context, even if its span is not to be linked. A separate
 * function, so that its stack is free when the unwinder runs: all functions in a call chain
 * share 512 bytes of stack.
 */
GLOBAL int collect_span(void)
{
	const struct span_path *path = get_span_path();
	u32 zero = 0;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct record *record;
	u64 table, found;

	if (!options || !own || !path || !path->tgid || path->tgid != own->record.tgid)
		return 0;
	record = &own->record;
	table = find_otel_context(record->tid);
	if (!table)
		return 0;
	record->labels = find_labels_in(path, &options->spans, table);
	found = find_span_context_in(path, table);
	if (!found)
		return 0;
	read_span_context(&options->spans, found, &record->span);
	return 1;
}

#endif

/*
 * Returns the wakeup flag for a record. The reader is woken in a range above the high-water mark,
 * because a record may skip the mark itself.
 */
INLINE u64 find_wakeup(const struct config *options, u64 start_time_ns)
{
	u32 zero = 0;
	struct reader *waiting = LOOKUP(reader, &zero);

	if (waiting) {
		if (start_time_ns > waiting->newest_start)
			waiting->newest_start = start_time_ns;
		if (start_time_ns >= waiting->waits_since)
			return BPF_RB_FORCE_WAKEUP;
	}
	return RING_USED(ring) - options->wakeup_bytes < options->wakeup_bytes / 8 ?
		       BPF_RB_FORCE_WAKEUP :
		       BPF_RB_NO_WAKEUP;
}

/*
 * Writes a record of the current thread to the ring, with its stacks and, if it waited for a lock,
 * the name of the lock's holder. The record already contains the thread's ids.
 */
INLINE enum written write_thread(void *ctx, struct config *options, struct record *record,
				 enum user_frames by, int python, int in_namespace,
				 const struct comm *holder)
{
	u64 flags = options->flags, limit = stack_bytes(options->stack_bytes);
	u64 kernel_bytes = 0, user_bytes = 0, python_bytes = 0, context_bytes = 0, bytes;
	int has_span = 0;
	long result;

	record->kernel_bytes = record->user_bytes = record->python_bytes = NOT_COLLECTED;
	if (flags & KERNEL_STACKS) {
		result = bpf_get_stack(ctx, record->frames, limit, 0);
		record->kernel_bytes = result;
		kernel_bytes = stack_bytes(result);
	}
	if (flags & USER_STACKS)
		user_bytes = collect_user_stack(ctx, options, record,
						(u8 *)record->frames + kernel_bytes, limit, by);
	/* Not an error: the CPU was in the mode (user or kernel) whose stacks are not collected. */
	if ((record->kernel_bytes == 0 && record->user_bytes == NOT_COLLECTED) ||
	    (record->user_bytes == 0 && record->kernel_bytes == NOT_COLLECTED))
		return NO_FRAMES;
#ifndef KPROFILER_BCC
	if (python && in_namespace && begins_python(ctx, record)) {
		python_bytes = collect_python_stack(kernel_bytes + user_bytes);
		BOUND(python_bytes, PYTHON_STACK_BYTES - 8);
		if (python_bytes)
			record->python_bytes = python_bytes;
	}
#endif

	note_program(options, record, bpf_get_current_task());
	record->cgroup_id = bpf_get_current_cgroup_id();
	bpf_get_current_comm(record->comm, sizeof(record->comm));
	record->span.trace_id[0] = record->span.trace_id[1] = record->span.span_id = 0;
	record->labels = 0;
#ifndef KPROFILER_BCC
	if (flags & SPAN_LINKS && in_namespace)
		has_span = collect_span();
#endif
	/* The published thread context is read only if the interpreter's objects have no span. */
	if (!has_span && flags & THREAD_CONTEXTS && in_namespace && may_publish(record->tgid)) {
		context_bytes = collect_thread_context(kernel_bytes + user_bytes + python_bytes);
		BOUND(context_bytes, CONTEXT_MASK);
	}
	record->context_bytes = context_bytes;
	/*
	 * Event samples may fill only three quarters of the ring; wakeup_bytes is half the ring
	 * size.
	 */
	if (FOLLOWS_EVENTS && record->kind >= FIRST_EVENT &&
	    RING_USED(ring) >= options->wakeup_bytes / 2 * 3)
		return NO_ROOM;
	bytes = kernel_bytes + user_bytes + python_bytes + context_bytes;
	if (holder) {
		*(struct comm *)((u8 *)record->frames + bytes) = *holder;
		bytes += sizeof(*holder);
	}
	if (RING_OUTPUT(ring, record, HEADER_BYTES + bytes,
			find_wakeup(options, record->start_time_ns)))
		return NO_ROOM;
#ifndef KPROFILER_BCC
	if (python_bytes)
		describe_codes();
#endif
	return WRITTEN;
}

/* Stores the current thread's ids in the record; returns whether the thread passes the filters. */
INLINE int is_followed(const struct config *options, struct record *record, int *in_namespace)
{
	u64 ids = bpf_get_current_pid_tgid();
	struct namespace_ids inner = {};

	record->tgid = ids >> 32;
	record->tid = (u32)ids;
	*in_namespace = 1;
	if (options->flags & NAMESPACE) {
		*in_namespace = !bpf_get_ns_current_pid_tgid(options->namespace_device,
							     options->namespace_inode, &inner,
							     sizeof(inner));
		if (*in_namespace) {
			record->tgid = inner.tgid;
			record->tid = inner.pid;
		}
	}
	return is_wanted(options, record, *in_namespace);
}

INLINE void sample(void *ctx, struct config *options, struct record *record,
		   struct cpu_line *line, enum user_frames by, int python)
{
	enum written written;
	int in_namespace;
	long result;

	if (!is_followed(options, record, &in_namespace)) {
		line->target++;
		return;
	}
	record->start_time_ns = start_time(options);
	if (options->min_age_ns && record->start_time_ns &&
	    record->time_ns - record->start_time_ns < options->min_age_ns) {
		line->age++;
		return;
	}

	if (!record->tid && !(options->flags & KEEP_IDLE)) {
		result = bpf_get_stack(ctx, record->frames, STACK_BYTES, 0);
		if (!in_interrupt(record, stack_bytes(result))) {
			line->idle++;
			return;
		}
	}
	written = write_thread(ctx, options, record, by, python, in_namespace, 0);
	if (written == NO_FRAMES) {
		line->empty++;
		return;
	}
	line->taken++;
	if (written == NO_ROOM)
		line->ring_full++;
}

/*
 * The kernel skips a perf event's program on a CPU that is running another BPF program or bpf(2),
 * and does not count the skipped runs. A late run is followed by an early run, so missed runs are
 * detected from the sum of the delays. An idle CPU may have stopped its timer.
 */
INLINE void count_missed(const struct config *options, struct last_run *last,
			 struct cpu_line *line, u64 now)
{
	u64 period = options->period_ns, since = last->time_ns, count;
	s64 late;

	if (!period || !(u32)bpf_get_current_pid_tgid()) {
		last->time_ns = 0;
		return;
	}
	last->time_ns = now;
	if (!since || since < options->regular_since_ns ||
	    now - since > LONGEST_GAP_NS + 2 * period) {
		last->late_ns = 0;
		return;
	}
	late = last->late_ns + (s64)(now - since - period);
	if (late > 0 && late + period / 4 >= period) {
		count = ((u64)late + period / 4) / period;
		line->missed += count;
		late -= count * period;
	}
	last->late_ns = late;
}

/*
 * Reads where the program's CPU was interrupted. The idle task is at rest if its pc and sp are those
 * of a stack without an interrupt: a frame of an interrupt would lower sp. This saves reading the
 * stack, which takes most of the program's time on an idle CPU.
 */
INLINE void read_position(const void *ctx, const struct config *options, struct position *to)
{
	u64 registers = 0, a64 = options->flags & A64;

	/* struct bpf_perf_event_data_kern begins with a pointer to struct pt_regs */
	if (READ_KERNEL(registers, ctx) ||
	    READ_KERNEL(to->pc, registers + (a64 ? A64_PC : X86_PC)) ||
	    READ_KERNEL(to->sp, registers + (a64 ? A64_SP : X86_SP)))
		to->pc = 0;
}

INLINE void begin_record(struct record *record, struct cpu_line *line, u32 cpu)
{
	*(volatile u64 *)&line->in_flight = IN_FLIGHT;
	record->time_ns = bpf_ktime_get_boot_ns();
	*(volatile u64 *)&line->in_flight = record->time_ns;
	record->cpu = cpu;
	record->kind = ON_CPU;
	record->phase = 0;
	record->value = 1;
}

INLINE void end_record(const struct record *record, struct cpu_line *line)
{
	line->busy_ns += bpf_ktime_get_boot_ns() - record->time_ns;
	*(volatile u64 *)&line->in_flight = 0;
}

/*
 * A program never interrupts itself on the same CPU (the kernel checks bpf_prog_active), so plain
 * increments are exact. User space derives from in_flight the time up to which it has received all
 * records.
 */
INLINE int run(void *ctx, enum user_frames by, int python)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id(), number, place;
	struct config *options = LOOKUP(config, &zero);
	struct scratch *own = LOOKUP(scratch, &zero);
	struct cpu_line *line;
	struct record *record;

	if (!options || !own || !take_scratch(own))
		return 0;
	record = &own->record;
	number = find_event(ctx, (void *)record->frames);
	place = number * EVENT_LINES + cpu;
	line = LOOKUP(cpu_lines, &place);
	if (!line) {
		free_scratch(own);
		return 0;
	}
	own->idle = line->idle;
	own->now.pc = 0;
	if (!number && !(u32)bpf_get_current_pid_tgid() && !(options->flags & SELECTS)) {
		record->time_ns = bpf_ktime_get_boot_ns();
		read_position(ctx, options, &own->now);
	}
	if (own->now.pc && own->now.pc == own->rest.pc && own->now.sp == own->rest.sp) {
		own->last.time_ns = 0;
		line->idle++;
		line->busy_ns += bpf_ktime_get_boot_ns() - record->time_ns;
		free_scratch(own);
		return 0;
	}
	begin_record(record, line, cpu);
	if (number)
		count_event(ctx, line, record, number);
	else
		count_missed(options, &own->last, line, record->time_ns);
	sample(ctx, options, record, line, by, python);
	if (own->now.pc && line->idle != own->idle)
		own->rest = own->now;
	end_record(record, line);
	free_scratch(own);
	return 0;
}

#ifndef KPROFILER_OTHER_TASK
PROGRAM("perf_event") int kprofiler_sample(void *ctx)
{
	return run(ctx, BY_FRAME_POINTERS, 0);
}

#ifndef KPROFILER_BCC
PROGRAM("perf_event") int kprofiler_unwind(void *ctx)
{
	return run(ctx, BY_TABLES, 0);
}

PROGRAM("perf_event") int kprofiler_unwind_5_10(void *ctx)
{
	return run(ctx, BY_TABLES_5_10, 0);
}

/* Variants of the sampler that also collect Python frames. */
PROGRAM("perf_event") int kprofiler_sample_python(void *ctx)
{
	return run(ctx, BY_FRAME_POINTERS, 1);
}

PROGRAM("perf_event") int kprofiler_unwind_python(void *ctx)
{
	return run(ctx, BY_TABLES, 1);
}

PROGRAM("perf_event") int kprofiler_unwind_5_10_python(void *ctx)
{
	return run(ctx, BY_TABLES_5_10, 1);
}

#include "wait.bpf.h"
#include "tracepoint.bpf.h"
#include "locks.bpf.h"
#endif
#endif

#ifndef KPROFILER_BCC
#include "mapped_files.bpf.h"
#endif
