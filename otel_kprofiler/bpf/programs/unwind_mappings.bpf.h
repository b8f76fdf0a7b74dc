// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds the mapping that contains a pc, and that mapping's file and unwind table.
 *
 * A program in an interrupt cannot take the mm's lock, so it reads the tree without locking. Tree
 * nodes may be freed and reused during the search, so the result is used only if it is a mapping of
 * this mm and contains the pc.
 */
#pragma once

#include "unwind_types.bpf.h"

enum {
	MAX_MAPLE_DEPTH = 6,
	MAX_RB_DEPTH = 40,
	MAPLE_NODE_BYTES = 256,
	MAPLE_SLOTS = 16,	/* slots in a leaf or range node; such a node has one pivot fewer */
	MAPLE_GAP_SLOTS = 10,	/* slots in a node that tracks gaps */
	MAPLE_LEAF = 1,		/* enum maple_type: nodes up to this type are leaves */
	MAPLE_GAP_NODE = 3,
	VM_EXEC = 4,
	VMA_BYTES = 256,	/* bytes to read from the start of a vm_area_struct */
	WORK_PER_WALK = 150,
};

/* Returns the entry in the mm's maple tree for pc; 0 if there is none. */
INLINE u64 walk_maple(struct unwind_work *w, const struct unwind_config *c)
{
	u64 entry = 0;

	if (READ_KERNEL(entry, w->mm + c->mm_tree))
		return 0;
#pragma clang loop unroll(disable)
	for (int depth = 0; depth < MAX_MAPLE_DEPTH; depth++) {
		u64 kind = entry >> 3 & 0xf;
		u32 pivots, i;

		if (!depth && ((entry & 3) != 2 || entry < PAGE)) /* not xa_is_node() */
			return entry;				  /* the mm has only one mapping */
		if (bpf_probe_read_kernel(w->node, MAPLE_NODE_BYTES, (void *)(entry & ~0xffULL)))
			return 0;
		/* struct maple_node: parent, pivots, slots */
		pivots = (kind == MAPLE_GAP_NODE ? MAPLE_GAP_SLOTS : MAPLE_SLOTS) - 1;
#pragma clang loop unroll(disable)
		for (i = 0; i < MAPLE_SLOTS - 1 && i < pivots; i++) {
			u64 pivot = w->node[1 + i];

			if (pivot >= w->target || (!pivot && i))
				break;
		}
		w->low = 1 + pivots + i;
		i = *(volatile u32 *)&w->low;
		entry = w->node[i & (2 * MAPLE_SLOTS - 1)];
		if (kind <= MAPLE_LEAF)
			return entry;
	}
	return 0;
}

/* Before 6.1: finds, in the mm's red-black tree, the first mapping that ends after pc. */
INLINE u64 walk_rb(struct unwind_work *w, const struct unwind_config *c)
{
	u64 node = 0, found = 0, start, end;

	if (READ_KERNEL(node, w->mm + c->mm_tree))
		return 0;
#pragma clang loop unroll(disable)
	for (int depth = 0; depth < MAX_RB_DEPTH && node; depth++) {
		u64 vma = node - c->vma_node;

		/* struct rb_node: parent and colour, right, left */
		if (READ_KERNEL(start, vma + c->vma_start) || READ_KERNEL(end, vma + c->vma_end) ||
		    bpf_probe_read_kernel(w->node, 24, (void *)node))
			return 0;
		if (end > w->target) {
			found = vma;
			if (start <= w->target)
				break;
			node = w->node[2];
		} else {
			node = w->node[1];
		}
	}
	return found;
}

INLINE u64 vma_word(const struct unwind_work *w, u32 offset)
{
	return w->node[offset >> 3 & (VMA_BYTES / 8 - 1)];
}

/* Copies to node[] the mapping that contains an address; returns 0 if there is one. */
GLOBAL int find_vma(u64 address)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	u64 vma, start;

	if (!w || !c)
		return 1;
	w->spent += WORK_PER_WALK;
	w->target = address;
	vma = c->flags & RB_TREE ? walk_rb(w, c) : walk_maple(w, c);
	if (!vma || bpf_probe_read_kernel(w->node, VMA_BYTES, (void *)vma))
		return 1;
	start = vma_word(w, c->vma_start);
	return vma_word(w, c->vma_mm) != w->mm || address - start >= vma_word(w, c->vma_end) - start;
}

/* Describes the file mapped in node[], but not the process that mapped the file. */
INLINE void fill_request(struct unwind_work *w, const struct unwind_config *c, const struct mapping *m)
{
	w->request.key = m->key;
	w->request.start = vma_word(w, c->vma_start);
	w->request.end = vma_word(w, c->vma_end);
	w->request.file_offset = w->request.start - m->bias;
	w->request.file_bytes = w->file_bytes;
	w->request.file_modified = w->file_modified;
}

/*
 * Requests the mapped file's unwind table from user space, at most once; node[] contains the
 * mapping.
 */
INLINE u32 request_file(struct unwind_work *w, const struct unwind_config *c, const struct mapping *m)
{
	struct file_state pending = {};

	/* EEXIST: another CPU has just requested the file. E2BIG: the map is full. */
	if (bpf_map_update_elem(&files, &m->key, &pending, BPF_NOEXIST))
		return FILE_PENDING;
	fill_request(w, c, m);
	w->request.tgid = w->tgid;
	w->request.tid = w->tid;
	if (RING_OUTPUT(file_requests, &w->request, sizeof(w->request), BPF_RB_FORCE_WAKEUP))
		bpf_map_delete_elem(&files, &m->key); /* the next sample requests the table again */
	return FILE_PENDING;
}

/* Returns a mapping's file state; if the file's table is loaded, sets m->shift. */
INLINE u32 find_table(struct unwind_work *w, const struct unwind_config *c, struct mapping *m, u64 pc)
{
	struct file_state *file = LOOKUP(files, &m->key);
	const struct table_header *header;
	void *table;
	u32 zero = 0, i;

	if (!file)
		return request_file(w, c, m);
	if (file->state != FILE_LOADED)
		return file->state;
	m->slot = file->slot;
	m->serial = file->serial;
	table = bpf_map_lookup_elem(&tables, &m->slot);
	if (!table)
		return FILE_PENDING; /* being replaced */
	header = bpf_map_lookup_elem(table, &zero);
	if (!header || header->serial != m->serial)
		return FILE_PENDING;
#pragma clang loop unroll(full)
	for (i = 0; i < MAX_TEXTS; i++) {
		if (pc - m->bias - header->text[i].offset < header->text[i].bytes) {
			m->shift = m->bias - header->text[i].delta;
			return FILE_LOADED;
		}
	}
	return FILE_UNAVAILABLE; /* executable, but not in any segment of the file */
}

/* Fills in the file of the mapping in node[]; returns 0 if the mapping has no readable file. */
INLINE int read_file(struct unwind_work *w, const struct unwind_config *c, struct mapping *m)
{
	u64 file = vma_word(w, c->vma_file), pages = vma_word(w, c->vma_offset);
	u64 inode = 0, super = 0;
	u32 seconds, ns;

	if (!file) {
		if (READ_KERNEL(w->vdso, w->mm + c->mm_vdso) || m->start != w->vdso || !w->vdso) {
			m->state = NO_FILE;
			return 0;
		}
		m->key.inode = 0;
		m->key.device = -1;
		m->key.generation = 0;
		m->bias = m->start;
		w->file_bytes = w->file_modified = 0;
		return 1;
	}
	if (READ_KERNEL(inode, file + c->file_inode) ||
	    READ_KERNEL(m->key.inode, inode + c->inode_number) ||
	    READ_KERNEL(m->key.generation, inode + c->inode_generation) ||
	    READ_KERNEL(seconds, inode + c->inode_mtime_seconds) ||
	    READ_KERNEL(ns, inode + c->inode_mtime_ns) ||
	    READ_KERNEL(w->file_bytes, inode + c->inode_size) ||
	    READ_KERNEL(super, inode + c->inode_super) ||
	    READ_KERNEL(m->key.device, super + c->super_device)) {
		m->state = NO_FILE;
		return 0;
	}
	/*
	 * A file may be overwritten in place. Files of images may have a fixed modification time,
	 * and the same inode number as a file of another image or subvolume.
	 */
	m->key.generation ^= seconds ^ ns ^ (u32)w->file_bytes;
	w->file_modified = (u64)seconds << 32 | ns;
	m->bias = vma_word(w, c->vma_start) - pages * c->page_bytes;
	return 1;
}

/*
 * Returns whether anonymous memory from `start` to `end` fills the gap between two mappings of one
 * file that are as far apart in memory as in the file. A process creates this layout when it copies
 * the file's text to huge pages. Overwrites node[] with one of the mappings.
 */
INLINE int is_moved_text(struct unwind_work *w, const struct unwind_config *c, u64 start, u64 end)
{
	u64 file, inode = 0, other = 0, bias;

	if (find_vma(start - 1) || vma_word(w, c->vma_end) != start)
		return 0;
	file = vma_word(w, c->vma_file);
	if (!file || READ_KERNEL(inode, file + c->file_inode))
		return 0;
	bias = vma_word(w, c->vma_start) - vma_word(w, c->vma_offset) * c->page_bytes;
	if (find_vma(end) || vma_word(w, c->vma_start) != end)
		return 0;
	file = vma_word(w, c->vma_file);
	return file && !READ_KERNEL(other, file + c->file_inode) && other == inode &&
	       vma_word(w, c->vma_start) - vma_word(w, c->vma_offset) * c->page_bytes == bias;
}

/* Fills in the file of text that was moved to anonymous memory; returns 0 for other mappings. */
INLINE int read_moved(struct unwind_work *w, const struct unwind_config *c, struct mapping *m)
{
	if (vma_word(w, c->vma_file) || !is_moved_text(w, c, m->start, m->end))
		return 0;
	m->state = FILE_PENDING;
	m->moved = read_file(w, c, m);
	return m->moved;
}

/* Sets `at` to the mapping that contains pc; returns 0 if there is one and it is executable. */
GLOBAL int find_mapping(u64 pc)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	struct mapping *m;
	u32 at;

	if (!w || !c)
		return 1;
	m = &w->kept[w->at & (KEPT_MAPPINGS - 1)]; /* usually the previous frame's mapping */
	if (pc - m->start < m->end - m->start)
		return !m->executable;
#pragma clang loop unroll(disable)
	for (at = 0; at < KEPT_MAPPINGS; at++) {
		m = &w->kept[at];
		if (pc - m->start < m->end - m->start) {
			w->at = at;
			return !m->executable;
		}
	}
	if (find_vma(pc))
		return 1;
	at = w->next_kept++ & (KEPT_MAPPINGS - 1);
	w->at = at;
	m = &w->kept[at];
	m->start = vma_word(w, c->vma_start);
	m->end = vma_word(w, c->vma_end);
	m->sample = 0;
	m->moved = 0;
	m->executable = vma_word(w, c->vma_flags) / VM_EXEC & 1;
	if (!m->executable)
		return 1;
	if (read_file(w, c, m) || read_moved(w, c, m))
		m->state = find_table(w, c, m, pc);
	return 0;
}

/*
 * Drops the mappings cached by the last walk on this CPU, unless they are still valid: the mm is
 * the same, no writer has locked it, and user space has not changed `files` or `tables`.
 */
INLINE void drop_mappings(struct unwind_work *w, const struct unwind_config *c)
{
	u64 base = 0, *epoch;
	u32 sequence = 0, zero = 0;

	epoch = LOOKUP(table_epoch, &zero);
	if (epoch && c->flags & KEEP_MAPPINGS && !READ_KERNEL(base, w->mm + c->mm_base) &&
	    !READ_KERNEL(sequence, w->mm + c->mm_sequence)) {
		if (w->kept_mm == w->mm && w->kept_tgid == w->tgid && w->kept_base == base &&
		    w->kept_sequence == sequence && w->kept_epoch == *epoch &&
		    !(sequence & 1)) /* odd: locked for writing (since Linux 6.13) */
			return;
		w->kept_mm = w->mm;
		w->kept_tgid = w->tgid;
		w->kept_base = base;
		w->kept_sequence = sequence;
		w->kept_epoch = *epoch;
	}
	w->next_kept = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < KEPT_MAPPINGS; i++)
		w->kept[i].start = w->kept[i].end = 0;
}
