// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Lists the files that running processes have mapped as code, so that the files' unwind tables can
 * be loaded before the first sample. File keys are built by the same code as in the unwinder.
 *
 * This program must run before sampling starts, because it uses the unwinder's scratch memory.
 */
#pragma once

#include "unwind_mappings.bpf.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct upid {
	int nr;
	void *ns;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct task_struct {
	int tgid;
	struct task_struct *group_leader;
	struct pid *thread_pid;
};

struct super_block {
	unsigned long s_magic;
};

struct inode {
	struct super_block *i_sb;
};

struct file {
	struct inode *f_inode;
};

struct bpf_iter_meta {
	void *seq;
};

struct vm_area_struct;

struct bpf_iter__task_vma {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	struct vm_area_struct *vma;
};
#pragma clang attribute pop

/* Returns the process's id in its pid namespace; 0 if it has exited. */
INLINE u32 find_inner_tgid(struct task_struct *task)
{
	struct task_struct *leader = 0;
	struct pid *pid = 0;
	u32 level = 0, number = 0;

	READ_KERNEL(leader, &task->group_leader);
	READ_KERNEL(pid, &leader->thread_pid);
	READ_KERNEL(level, &pid->level);
	READ_KERNEL(number, (u64)&pid->numbers[0] + level * sizeof(struct upid));
	return number;
}

/*
 * Returns whether a file is on a network or user-space file system (linux/magic.h).
 * Reading a remote file may take arbitrarily long, so remote files are not listed.
 */
INLINE int is_remote(u64 address)
{
	struct file *file = (struct file *)address;
	struct inode *inode = 0;
	struct super_block *super = 0;
	unsigned long magic = 0;

	READ_KERNEL(inode, &file->f_inode);
	READ_KERNEL(super, &inode->i_sb);
	READ_KERNEL(magic, &super->s_magic);
	switch (magic) {
	case 0x65735546: /* FUSE */
	case 0x6969:	 /* NFS */
	case 0x517B:	 /* SMB */
	case 0xFF534D42: /* CIFS */
	case 0xFE534D42: /* SMB2 */
	case 0x00C36400: /* Ceph */
	case 0x01021997: /* 9P */
	case 0x5346414F: /* AFS */
	case 0x6B414653:
	case 0x73757245: /* Coda */
		return 1;
	}
	return 0;
}

/* Reports a mapping's file. `tgid` is from the initial pid namespace, `tid` from the innermost. */
PROGRAM("iter/task_vma") int kprofiler_list_files(struct bpf_iter__task_vma *context)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	struct task_struct *task = context->task;
	struct vm_area_struct *vma = context->vma;
	struct mapping *m;

	if (!w || !c || !task || !vma || bpf_probe_read_kernel(w->node, VMA_BYTES, vma) ||
	    !(vma_word(w, c->vma_flags) & VM_EXEC) || is_remote(vma_word(w, c->vma_file)))
		return 0;
	m = &w->kept[0];
	m->start = vma_word(w, c->vma_start);
	w->mm = vma_word(w, c->vma_mm);
	if (read_file(w, c, m)) {
		fill_request(w, c, m);
		READ_KERNEL(w->request.tgid, &task->tgid);
		w->request.tid = find_inner_tgid(task);
		bpf_seq_write(context->meta->seq, &w->request, sizeof(w->request));
	}
	m->start = m->end = 0;
	return 0;
}
