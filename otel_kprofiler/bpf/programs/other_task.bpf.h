// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Allows the sampler's code to read the state of a sleeping thread while running in the process
 * that runs the dump: the code uses `other.task` in place of the current task.
 *
 * Reads the thread's memory through the kernel's direct map of physical memory, by walking the page
 * tables as the processor does (on x86-64 only). The walk takes none of the process's locks, faults
 * in no pages, never waits, and needs only the task iterator. bpf_copy_from_user_task() (Linux
 * 5.18) takes mmap_lock, faults pages in and waits. That helper would hang on exactly the processes
 * that a dump should explain: those that hold their mmap_lock, or map a file on an unreachable
 * server.
 *
 * Any step may read memory that has been freed and reused. The data is used only if the thread did
 * not run during the walk (dump.bpf.c).
 */
#pragma once

#include "loaders.bpf.h"

enum {
	PAGE_BITS = 12,
	PAGE_SIZE = 1 << PAGE_BITS,
	LEVEL_BITS = 9,
	PAGE_LEVELS = 5,
	KEPT_PAGES = 64, /* a power of two */
	/* arch/x86/include/asm/pgtable_types.h */
	PTE_PRESENT = 1 << 0,
	PTE_USER = 1 << 2,
	PTE_HUGE = 1 << 7,
	PTE_PROT_NONE = 1 << 8, /* set by NUMA balancing in place of PTE_PRESENT */
	HUGE_BITS = 21,	 /* 2 MiB page */
	GIANT_BITS = 30, /* 1 GiB page */
};

/* Location of the kernel's direct map; written by user space and kprofiler_find_memory. */
struct memory_layout {
	u64 direct_map;	   /* kernel address of physical address 0; 0: unknown */
	u64 physical_mask; /* bits of a page table entry that hold the physical address */
	u64 tried;	   /* number of start addresses tried, in steps of 1 GiB downward from the page table */
	u64 proof_at;	   /* address in the profiler process at which `proof` is stored */
	u64 proof;
};

struct kept_page {
	u64 page;
	u64 at; /* kernel address of the page */
};

struct other {
	u64 task;
	u64 ids;       /* in the format of bpf_get_current_pid_tgid() */
	u64 registers; /* address of the user registers */
	u64 user_pc;
	u64 table;     /* address of the top-level page table; 0 if no memory can be read */
	u64 pieces_at; /* address of `pieces` */
	struct kept_page kept[KEPT_PAGES];
	u8 pieces[2 * PAGE_SIZE]; /* a copy of bytes that span two pages */
};

MMAP_ARRAY(memory_layout, struct memory_layout, 1);
SCRATCH(other, struct other);

INLINE struct other *get_other(void)
{
	u32 zero = 0;

	return LOOKUP(other, &zero);
}

/* Returns the kernel address of a byte in the other task's memory; 0 if it is not resident. */
GLOBAL u64 find_byte(u64 address)
{
	u32 zero = 0, shift;
	const struct memory_layout *layout = LOOKUP(memory_layout, &zero);
	struct other *own = get_other();
	u64 table, entry, page = address >> PAGE_BITS, start;
	struct kept_page *kept;

	if (!layout || !own || !own->table)
		return 0;
	kept = &own->kept[page & (KEPT_PAGES - 1)];
	if (kept->at && kept->page == page)
		return kept->at + (address & (PAGE_SIZE - 1));
	table = own->table;
	shift = PAGE_BITS + 4 * LEVEL_BITS;
	if (table >> 47 == 0x1ffff) /* 4-level paging: user addresses have 47 bits */
		shift -= LEVEL_BITS;
	if (address >> (shift + LEVEL_BITS - 1)) /* the kernel's half of the address space */
		return 0;
#pragma clang loop unroll(disable)
	for (int level = 0; level < PAGE_LEVELS; level++) {
		u64 mask = layout->physical_mask;

		if (READ_KERNEL(entry, table + (address >> shift & ((1 << LEVEL_BITS) - 1)) * 8))
			return 0;
		if (!(entry & PTE_PRESENT)) {
			if (!(entry & PTE_PROT_NONE) || shift > HUGE_BITS)
				return 0;
			entry ^= ~(u64)(PAGE_SIZE - 1); /* pgtable-invert.h */
		} else if (!(entry & PTE_USER)) {
			return 0;
		}
		if (shift == PAGE_BITS || (entry & PTE_HUGE && shift <= GIANT_BITS)) {
			start = entry & mask & ~((1ULL << shift) - 1);
			start += layout->direct_map + (address & ((1ULL << shift) - 1));
			kept->page = page;
			kept->at = start & ~(u64)(PAGE_SIZE - 1);
			return start;
		}
		if (shift < PAGE_BITS + LEVEL_BITS)
			return 0;
		table = layout->direct_map + (entry & mask);
		shift -= LEVEL_BITS;
	}
	return 0;
}

/*
 * Returns a kernel address at which up to a page of the other task's memory can be read; 0 if it is
 * not resident.
 */
GLOBAL u64 find_bytes(u64 address, u64 bytes)
{
	struct other *own = get_other();
	u64 room = PAGE_SIZE - (address & (PAGE_SIZE - 1)), first, second;

	if (!own || bytes > PAGE_SIZE)
		return 0;
	first = find_byte(address);
	if (bytes <= room || !first)
		return first;
	second = find_byte(address + room);
	if (!second)
		return 0;
	BOUND(room, PAGE_SIZE - 1);
	bytes -= room;
	BOUND(bytes, PAGE_SIZE - 1);
	if (bpf_probe_read_kernel(own->pieces, room, (void *)first) ||
	    bpf_probe_read_kernel(own->pieces + room, bytes, (void *)second))
		return 0;
	/*
	 * BPF functions cannot return pointers; storing and rereading a pointer makes it a scalar
	 * to the verifier.
	 */
	*(u8 *volatile *)&own->pieces_at = own->pieces;
	return *(volatile u64 *)&own->pieces_at;
}

INLINE long read_other_user(void *to, u64 size, const void *from)
{
	u64 at = find_bytes((u64)from, size);

	return at ? bpf_probe_read_kernel(to, size, (void *)at) : -14; /* EFAULT */
}

INLINE u64 get_other_task(void)
{
	const struct other *own = get_other();

	return own ? own->task : 0;
}

INLINE u64 get_other_ids(void)
{
	const struct other *own = get_other();

	return own ? own->ids : 0;
}

/* Like bpf_get_stack(), but copies only the leaf address of the other task's user stack. */
INLINE long get_other_stack(void *to, u32 size, u64 flags)
{
	const struct other *own = get_other();

	if (!own || !(flags & BPF_F_USER_STACK) || size != sizeof(own->user_pc))
		return -95; /* EOPNOTSUPP */
	*(u64 *)to = own->user_pc;
	return size;
}

/* Reads the memory of the process that runs the program. */
INLINE long read_own_user(void *to, u32 size, const void *from)
{
	return bpf_probe_read_user(to, size, from);
}

INLINE u64 get_own_task(void)
{
	return bpf_get_current_task();
}

#define bpf_get_stack(context, to, size, flags) ((void)(context), get_other_stack(to, size, flags))
#define bpf_probe_read_user read_other_user
#define bpf_get_current_task get_other_task
#define bpf_get_current_pid_tgid get_other_ids
