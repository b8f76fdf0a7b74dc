// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs the unwinder and, in the same interrupt, copies the registers and the stack that it started
 * from, so that another unwinder can unwind the same stack.
 */
#include "unwind.bpf.h"

enum {
	DUMP_PAGES = 24,
	OTHER_PAGES = 8,
	PAGE_BYTES = 4096,
};

struct dump_config {
	u32 tgid;
	u32 max_frames;
	u32 top_of_stack;
	u32 forget; /* whether to drop cached rules and mappings before each walk */
	/*
	 * offsets in task_struct and in structs of the Go runtime; g_sched is 0 if the program is
	 * not a Go program
	 */
	u32 task_fsbase;
	u32 g_m;
	u32 g_stack;
	u32 g_sched;
	u32 m_curg;
};

struct dump {
	u64 time_ns;
	u64 spent_ns;
	u64 again_ns; /* time taken by a second walk, with warm caches */
	u64 pointers_ns; /* time taken by the kernel's unwinder, which follows frame pointers */
	u32 tgid;
	u32 tid;
	u32 pages;
	u32 work;
	u32 pointers; /* number of frames found by the kernel's unwinder */
	u32 other_pages; /* pages of the goroutine's stack */
	u32 switched;	 /* the thread is on another stack */
	u32 reserved;
	u64 other_base;
	u64 other_sp;
	u64 other_pc;
	u64 registers[MAX_BLOCK_BYTES / 8];
	u8 stack[USER_STACK_BYTES];
	u8 page[DUMP_PAGES * PAGE_BYTES];
	u8 other[OTHER_PAGES * PAGE_BYTES];
};

ARRAY(dump_config, struct dump_config, 1);
ARRAY(dumps, struct dump, 64);
ARRAY(skipped, u64, 1);
RING(ring);

/* Drops this CPU's cached rules and mappings. */
INLINE void forget(struct unwind_work *w)
{
	u32 cpu = w->cpu;
	struct rules *cache = LOOKUP(rules, &cpu);

	w->kept_mm = 0;
	w->cie_serial = 0;
	w->at = 0;
	w->low = 0;
	if (!cache)
		return;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < RULES; i++) {
		u32 at = *(volatile u32 *)&w->low;

		cache->rule[at & (RULES - 1)].key = 0;
		w->low = at + 1;
	}
}

/*
 * Copies the stack of the thread's current goroutine, upwards from the sp saved in g.sched or
 * downwards from the stack's high end.
 */
INLINE void dump_goroutine(const struct dump_config *wanted, struct dump *dump)
{
	u64 fs, g, m, goroutine, high;
	s64 step;

	dump->other_pages = dump->switched = 0;
	if (!wanted->g_sched || READ_KERNEL(fs, bpf_get_current_task() + wanted->task_fsbase) ||
	    READ_USER(g, fs - 8) || READ_USER(m, g + wanted->g_m) ||
	    READ_USER(goroutine, m + wanted->m_curg) ||
	    READ_USER(high, goroutine + wanted->g_stack + 8))
		return;
	dump->other_base = high - PAGE_BYTES;
	step = -PAGE_BYTES;
	if (g != goroutine) {
		if (READ_USER(dump->other_sp, goroutine + wanted->g_sched) ||
		    READ_USER(dump->other_pc, goroutine + wanted->g_sched + 8))
			return;
		dump->switched = 1;
		dump->other_base = dump->other_sp & ~(PAGE_BYTES - 1ULL);
		step = PAGE_BYTES;
	}
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < OTHER_PAGES; i++) {
		if (bpf_probe_read_user(dump->other + i * PAGE_BYTES, PAGE_BYTES,
					(void *)(dump->other_base + i * step)))
			break;
		dump->other_pages = i + 1;
	}
}

INLINE int dump(void *ctx, u64 registers)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct dump_config *wanted = LOOKUP(dump_config, &zero);
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	struct dump *dump = LOOKUP(dumps, &cpu);
	u64 ids = bpf_get_current_pid_tgid(), *skip = LOOKUP(skipped, &zero);
	u64 began, bytes, sp;
	long found;

	if (!wanted || !w || !c || !dump || !skip || wanted->tgid != ids >> 32)
		return 0;
	w->tgid = dump->tgid = ids >> 32;
	w->tid = dump->tid = ids;
	w->cpu = cpu;
	w->max_frames = wanted->max_frames;
	w->user_registers = wanted->top_of_stack ? 0 : registers;
	dump->time_ns = w->time_ns = bpf_ktime_get_boot_ns();
	if (wanted->forget)
		forget(w);
	began = bpf_ktime_get_ns();
	if (unwind()) {
		*skip += 1;
		return 0;
	}
	dump->spent_ns = bpf_ktime_get_ns() - began;
	dump->work = w->spent;
	copy_stack(w, dump->stack);
	began = bpf_ktime_get_ns();
	unwind();
	dump->again_ns = bpf_ktime_get_ns() - began;
	began = bpf_ktime_get_ns();
	found = bpf_get_stack(ctx, dump->page, MAX_USER_FRAMES * sizeof(u64), BPF_F_USER_STACK);
	dump->pointers_ns = bpf_ktime_get_ns() - began;
	dump->pointers = found > 0 ? found / sizeof(u64) : 0;
	bytes = c->interrupt.bytes;
	BOUND(bytes, MAX_BLOCK_BYTES - 1);
	if (bpf_probe_read_kernel(dump->registers, bytes, (void *)registers))
		return 0;
	sp = dump->registers[c->interrupt.sp_at >> 3 & 63] & ~(PAGE_BYTES - 1ULL);
	dump->pages = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < DUMP_PAGES; i++) {
		if (bpf_probe_read_user(dump->page + i * PAGE_BYTES, PAGE_BYTES,
					(void *)(sp + i * PAGE_BYTES)))
			break;
		dump->pages = i + 1;
	}
	dump_goroutine(wanted, dump);
	if (RING_OUTPUT(ring, dump, sizeof(*dump), BPF_RB_NO_WAKEUP))
		*skip += 1;
	return 0;
}

PROGRAM("perf_event") int dump_stack(void *ctx)
{
	return dump(ctx, bpf_task_pt_regs(bpf_get_current_task_btf()));
}

PROGRAM("perf_event") int dump_stack_5_10(void *ctx)
{
	struct unwind_config *c = get_unwind_config();
	u64 task = bpf_get_current_task(), stack;

	if (!c || READ_KERNEL(stack, task + c->task_stack))
		return 0;
	return dump(ctx, stack + c->stack_top_registers);
}
