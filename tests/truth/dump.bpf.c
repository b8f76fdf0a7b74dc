// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs the unwinder and, in the same interrupt, copies the registers and the stack it started
 * from, so that another implementation can unwind the same stack.
 */
#include "unwind.bpf.h"

enum {
	DUMP_PAGES = 14,
	PAGE_BYTES = 4096,
};

struct dump_config {
	u32 tgid;
	u32 max_frames;
	u32 top_of_stack;
	u32 reserved;
};

struct dump {
	u64 time_ns;
	u64 spent_ns;
	u64 again_ns; /* of a second walk, with warm caches */
	u32 tgid;
	u32 tid;
	u32 pages;
	u32 work;
	u64 registers[MAX_BLOCK_BYTES / 8];
	u8 stack[USER_STACK_BYTES];
	u8 page[DUMP_PAGES * PAGE_BYTES];
};

ARRAY(dump_config, struct dump_config, 1);
ARRAY(dumps, struct dump, 64);
ARRAY(skipped, u64, 1);
RING(ring);

static u64 (*bpf_ktime_get_ns)(void) = (void *)5;

INLINE int dump(u64 registers)
{
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	struct dump_config *wanted = LOOKUP(dump_config, &zero);
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	struct dump *dump = LOOKUP(dumps, &cpu);
	u64 ids = bpf_get_current_pid_tgid(), *skip = LOOKUP(skipped, &zero);
	u64 began, bytes, sp;

	if (!wanted || !w || !c || !dump || !skip || wanted->tgid != ids >> 32)
		return 0;
	w->tgid = dump->tgid = ids >> 32;
	w->tid = dump->tid = ids;
	w->cpu = cpu;
	w->max_frames = wanted->max_frames;
	w->user_registers = wanted->top_of_stack ? 0 : registers;
	dump->time_ns = w->time_ns = bpf_ktime_get_boot_ns();
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
	if (RING_OUTPUT(ring, dump, sizeof(*dump), BPF_RB_NO_WAKEUP))
		*skip += 1;
	return 0;
}

PROGRAM("perf_event") int dump_stack(__attribute__((unused)) void *ctx)
{
	return dump(bpf_task_pt_regs(bpf_get_current_task_btf()));
}

PROGRAM("perf_event") int dump_stack_5_10(__attribute__((unused)) void *ctx)
{
	struct unwind_config *c = get_unwind_config();
	u64 task = bpf_get_current_task(), stack;

	if (!c || READ_KERNEL(stack, task + c->task_stack))
		return 0;
	return dump(stack + c->stack_top_registers);
}
