// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs the unwinder as native code on a recorded process. The kernel's helpers, maps and structs
 * are replaced, so stacks of any architecture can be unwound on this machine.
 */
#include "loaders.bpf.h"

#undef BOUND
#define BOUND(x, mask) ((x) &= (mask))

#include "unwind.bpf.h"

#include <string.h>

enum { MOST = 64 };

struct region { /* contents of a memory range of the process */
	u64 start;
	u64 bytes;
	const u8 *content;
};

struct table {
	u64 bytes;
	u8 *content;
	struct file_state state;
	u64 inode;
};

/* Mock kernel structs; the member offsets must match KERNEL in native.py. */
struct vma {
	u64 start, end, mm, flags, pages, file, parent, right, left;
	u64 rest[VMA_BYTES / 8 - 9];
};
struct inode {
	u64 number, super, generation, bytes, seconds, ns;
};

static struct unwind_config config;
static struct unwind_work work;
static struct rules cache;
static struct region region[MOST];
static struct table table[MOST];
static struct vma vma[MOST];
static struct inode inode[MOST];
static u64 file[MOST], task[2], mm[5], epoch, used, super;
static u32 regions, loaded, mappings;

static void *lookup(void *map, const void *key)
{
	u64 at = (u64) * (const u32 *)key * PAGE;

	if (map == &unwind_config)
		return &config;
	if (map == &unwind_work)
		return &work;
	if (map == &rules)
		return &cache;
	if (map == &table_epoch)
		return &epoch;
	if (map == &table_used)
		return &used;
	if (map == &tables)
		return *(const u32 *)key < loaded ? &table[*(const u32 *)key] : NULL;
	for (u32 i = 0; i < loaded; i++) {
		if (map == &files && table[i].inode == ((const struct file_key *)key)->inode)
			return &table[i].state;
		if (map == &table[i])
			return at < table[i].bytes ? table[i].content + at : NULL;
	}
	return NULL;
}

static long update(void *map, const void *key, const void *value, u64 flags)
{
	(void)map, (void)key, (void)value, (void)flags;
	return -1;
}

static long read_kernel(void *to, u32 size, const void *from)
{
	memcpy(to, from, size);
	return 0;
}

static long read_user(void *to, u32 size, const void *from)
{
	for (u32 i = 0; i < regions; i++) {
		u64 at = (u64)from - region[i].start;

		if (at < region[i].bytes && size <= region[i].bytes - at) {
			memcpy(to, region[i].content + at, size);
			return 0;
		}
	}
	return -1;
}

static u64 current_task(void)
{
	return (u64)task;
}

/* Resets the simulated process and its memory; `settings` is the architecture's struct unwind_config. */
void begin(const void *settings)
{
	memset(&work, 0, sizeof(work));
	memset(&cache, 0, sizeof(cache));
	memcpy(&config, settings, sizeof(config));
	regions = loaded = mappings = 0;
	mm[0] = mm[3] = 0;
	mm[4] = 1; /* mm->end_code; nonzero after the program has started */
	task[0] = (u64)mm;
	bpf_map_lookup_elem = lookup;
	bpf_map_update_elem = update;
	bpf_probe_read_kernel = read_kernel;
	bpf_probe_read_user = read_user;
	bpf_get_current_task = current_task;
}

/* Adds memory at an address; it takes precedence over memory added there earlier. */
void add_memory(u64 start, u64 bytes, const u8 *content)
{
	memmove(region + 1, region, regions++ * sizeof(*region));
	region[0] = (struct region){ start, bytes, content };
}

void drop_memory(void)
{
	memmove(region, region + 1, --regions * sizeof(*region));
}

/* Adds a file with its table (`bytes` is 0 if there is no table); returns its slot. */
u32 add_table(u64 number, u8 *content, u64 bytes)
{
	struct file_state state = { bytes ? FILE_LOADED : FILE_NO_TABLE, loaded };

	state.serial = bytes ? *(u32 *)content : 0;
	table[loaded] = (struct table){ bytes, content, state, number };
	return loaded++;
}

/* Adds an executable mapping above all earlier mappings; inode 0 denotes the vDSO. */
void add_mapping(u64 start, u64 end, u64 offset, u64 number)
{
	struct vma *one = &vma[mappings];

	inode[mappings] = (struct inode){ .number = number, .super = (u64)&super };
	file[mappings] = (u64)&inode[mappings];
	*one = (struct vma){ .start = start, .end = end, .mm = (u64)mm, .flags = VM_EXEC,
			     .pages = offset / PAGE, .file = number + 1 > 1 ? (u64)&file[mappings] : 0 };
	if (!number)
		mm[3] = start;
	if (mappings++)
		one[-1].right = (u64)&one->parent; /* the tree degenerates into a list */
	else
		mm[0] = (u64)&one->parent;
}

/* Unwinds from registers given as pt_regs; returns the size of the copied stack, 0 on error. */
u64 unwind_process(const void *registers, u32 max_frames, u8 *stack)
{
	work.user_registers = (u64)registers;
	work.max_frames = max_frames;
	work.kept_mm = 0;
	return unwind() ? 0 : copy_stack(&work, stack);
}

/* Finds the row for an address in a table's file; returns a value of enum rule_errors. */
int find_row(u32 slot, u64 address, struct row *row)
{
	int error;

	work.at = 0;
	work.spent = 0;
	work.kept[0].slot = slot;
	work.kept[0].serial = table[slot].state.serial;
	error = find_rule(address);
	*row = work.rule.row;
	return error;
}
