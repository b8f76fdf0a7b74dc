// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Selects the processes to sample: by id (optionally with their descendants), by name, or by
 * cgroup. Included by sampler.bpf.c after its structs.
 */

enum {
	MAX_ANCESTORS = 16,
	MAX_CGROUP_LEVELS = 16,
};

HASH(targets, u8, SIZED_BY_LOADER); /* keys are tgids as stored in records */
HASH(roots, u8, SIZED_BY_LOADER);   /* target ids in the initial namespace, for finding descendants */
HASH_OF(comms, struct comm, u8, SIZED_BY_LOADER);
HASH_OF(cgroups, u64, u8, SIZED_BY_LOADER);

/* Returns whether an ancestor of the current process is a target. */
INLINE int descends(const struct config *options)
{
	u64 task = bpf_get_current_task();

#pragma clang loop unroll(disable)
	for (int i = 0; i < MAX_ANCESTORS; i++) {
		u64 child = task;
		u32 tgid = 0;

		if (bpf_probe_read_kernel(&task, sizeof(task), (void *)(child + options->parent_offset)))
			return 0;
		if (bpf_probe_read_kernel(&tgid, sizeof(tgid), (void *)(task + options->tgid_offset)))
			return 0;
		if (LOOKUP(roots, &tgid))
			return 1;
		if (tgid <= 1)
			return 0;
	}
	return 0;
}

/* Returns whether the current process is a target, based on its ids in `record`. */
INLINE int is_target(const struct config *options, const struct record *record, int in_namespace)
{
	if (in_namespace && LOOKUP(targets, &record->tgid)) {
		u32 tgid = bpf_get_current_pid_tgid() >> 32;
		u8 here = 1;

		/* Only the kernel knows the targets' ids in the initial namespace. */
		if (options->flags & DESCENDANTS && !LOOKUP(roots, &tgid))
			UPDATE(roots, &tgid, &here);
		return 1;
	}
	return options->flags & DESCENDANTS && descends(options);
}

/* Returns whether the current thread or its process has a selected name; sets record->comm. */
INLINE int has_comm(const struct config *options, struct record *record)
{
	u64 leader = 0, task = bpf_get_current_task();

	bpf_get_current_comm(record->comm, sizeof(record->comm));
	if (LOOKUP(comms, record->comm))
		return 1;
	if (!options->comm_offset)
		return 0;
	if (bpf_probe_read_kernel(&leader, sizeof(leader), (void *)(task + options->leader_offset)))
		return 0;
	/* Clear the bytes after the name, which older kernels do not write. */
	__builtin_memset(record->comm, 0, sizeof(record->comm));
	bpf_probe_read_kernel_str(record->comm, sizeof(record->comm),
				  (void *)(leader + options->comm_offset));
	return LOOKUP(comms, record->comm) != 0;
}

#ifndef KPROFILER_BCC
/* libbpf sets this before it loads the program */
extern int LINUX_KERNEL_VERSION __attribute__((section(".kconfig")));

/*
 * Returns whether the current process is in or below one of the cgroups. Kernels before 5.15 lack
 * the helper; the version check hides the call from their verifier.
 */
INLINE int in_cgroup(const struct config *options)
{
	if (LINUX_KERNEL_VERSION < (5 << 16 | 15 << 8))
		return 0;
#pragma clang loop unroll(disable)
	for (u32 level = 0; level < MAX_CGROUP_LEVELS; level++) {
		u64 id;

		if (!(options->cgroup_levels >> level & 1))
			continue;
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (id && LOOKUP(cgroups, &id))
			return 1;
	}
	return 0;
}
#endif

/* Returns whether the current process passes all filters. */
INLINE int is_wanted(const struct config *options, struct record *record, int in_namespace)
{
	u64 flags = options->flags;

	if (flags & ONLY_TARGETS && !is_target(options, record, in_namespace))
		return 0;
	if (flags & ONLY_COMMS && !has_comm(options, record))
		return 0;
#ifndef KPROFILER_BCC
	if (flags & ONLY_CGROUPS && !in_cgroup(options))
		return 0;
#endif
	return 1;
}
