// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports each unregistered process that is sampled, so that user space can check whether it runs
 * CPython. A process is reported once, and again when it executes another program or maps new code.
 * If a process keeps mapping and unmapping code, reports about it become less frequent. If a
 * short-lived program without an interpreter runs repeatedly, it is reported once a minute.
 */
#pragma once

#include "python_types.bpf.h"

/* Returns an id for a process's current program; 0 if kernel memory cannot be read. */
INLINE u64 find_image(const struct python_config *c, const struct record *record)
{
	u64 exec_id = 0;

	if (!record->start_time_ns || READ_KERNEL(exec_id, bpf_get_current_task() + c->task_exec_id))
		return 0;
	return mix(record->start_time_ns, exec_id) | 1;
}

/* Finds a process's program; leaves its inode at 0 if kernel memory cannot be read. */
INLINE void find_program(const struct python_config *c, u64 mm, struct program_key *key)
{
	u64 file = 0, inode = 0, super = 0;
	u32 device = 0;

	if (READ_KERNEL(file, mm + c->mm_exe) || !file ||
	    READ_KERNEL(inode, file + c->file_inode) || !inode ||
	    READ_KERNEL(super, inode + c->inode_super) ||
	    READ_KERNEL(device, super + c->super_device))
		return;
	key->device = device;
	READ_KERNEL(key->inode, inode + c->inode_number);
}

/* Reports the process in the current record. Its current program must not be registered. */
GLOBAL int tell_process(void)
{
	u32 zero = 0;
	const struct python_config *c = LOOKUP(python_config, &zero);
	const struct scratch *own = LOOKUP(scratch, &zero);
	struct process_told now = {};
	const struct process_told *told;
	struct process_seen seen = {};
	const u64 *until;
	u64 mm = 0;

	if (!c || !own)
		return 0;
	/* Short-lived processes wait often, and exit before they can be examined. */
	if (own->record.kind == OFF_CPU &&
	    own->record.time_ns - own->record.start_time_ns < LEAST_AGE_NS)
		return 0;
	seen.kind = PROCESS_SEEN;
	seen.tgid = own->record.tgid;
	now.image = seen.image = find_image(c, &own->record);
	now.time_ns = own->record.time_ns;
	if (!now.image || READ_KERNEL(mm, bpf_get_current_task() + c->task_mm) || !mm ||
	    READ_KERNEL(now.code_pages, mm + c->mm_code_pages))
		return 0; /* also for kernel threads, which have no user memory */
	told = LOOKUP(processes_told, &seen.tgid);
	if (told && told->image == now.image) {
		if (told->code_pages == now.code_pages || now.time_ns - told->time_ns < told->wait_ns)
			return 0;
		now.wait_ns = told->wait_ns < LONGEST_WAIT_NS ? 2 * told->wait_ns : LONGEST_WAIT_NS;
	} else {
		now.wait_ns = FIRST_WAIT_NS;
	}
	find_program(c, mm, &seen.program);
	seen.program.code_pages = now.code_pages;
	until = LOOKUP(other_programs, &seen.program);
	if ((until && now.time_ns < *until) ||
	    !RING_OUTPUT(python_codes, &seen, sizeof(seen), BPF_RB_FORCE_WAKEUP))
		UPDATE(processes_told, &seen.tgid, &now);
	return 0;
}
