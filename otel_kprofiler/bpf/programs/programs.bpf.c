// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Lists the functions of all BPF programs with their addresses, for a process that may load
 * programs but not walk them (CAP_BPF and CAP_PERFMON without CAP_SYS_ADMIN or CAP_SYSLOG).
 *
 * Only members that are named here are read; the loader finds their offsets in the running
 * kernel's BTF. Rows are read by iterator.py; change both together.
 */

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
	MAX_FUNCTIONS = 256, /* BPF_MAX_SUBPROGS, kernel/bpf/verifier.c */
	NAME_BYTES = 512,    /* KSYM_NAME_LEN; 128 until 6.0, then a name ends before it */
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct bpf_ksym {
	unsigned long start;
	unsigned long end;
	char name[NAME_BYTES];
};

struct bpf_prog;

struct bpf_prog_aux {
	u32 id;
	u32 func_cnt;
	u64 load_time;
	struct bpf_prog **func;
	struct bpf_ksym ksym;
};

struct bpf_prog {
	struct bpf_prog_aux *aux;
};

struct bpf_iter_meta {
	void *seq;
};

struct bpf_iter__bpf_prog {
	struct bpf_iter_meta *meta;
	struct bpf_prog *prog;
};
#pragma clang attribute pop

struct row {
	u64 start;
	u64 end;
	u64 load_time;
	u32 id;
	u32 name_bytes; /* the final zero is one of them */
	char name[NAME_BYTES];
};

struct {
	int (*type)[6]; /* BPF_MAP_TYPE_PERCPU_ARRAY */
	int (*max_entries)[1];
	u32 *key;
	struct row *value;
} rows __attribute__((section(".maps"), used));

static void *(*map_lookup)(void *, const void *) = (void *)1;
static long (*probe_read_kernel)(void *, u32, const void *) = (void *)113;
static unsigned long (*probe_read_kernel_str)(void *, u32, const void *) = (void *)115;
static long (*seq_write)(void *, const void *, u32) = (void *)127;

#define READ(into, from) probe_read_kernel(&(into), sizeof(into), &(from))

static void write_row(void *seq, struct row *row, struct bpf_prog_aux *aux)
{
	unsigned long length;

	READ(row->start, aux->ksym.start);
	READ(row->end, aux->ksym.end);
	length = probe_read_kernel_str(row->name, NAME_BYTES, &aux->ksym.name);
	if (length < 2 || length > NAME_BYTES)
		return; /* no name: it is not compiled */
	row->name_bytes = length;
	seq_write(seq, row, sizeof(*row) - NAME_BYTES + length);
}

__attribute__((section("iter/bpf_prog"), used))
int list_programs(struct bpf_iter__bpf_prog *context)
{
	struct bpf_prog *program = context->prog, *part;
	struct bpf_prog_aux *aux;
	struct bpf_prog **parts;
	u32 first = 0, count = 0;
	struct row *row;

	row = map_lookup(&rows, &first);
	if (!program || !row)
		return 0;
	READ(aux, program->aux);
	READ(row->id, aux->id);
	READ(row->load_time, aux->load_time);
	READ(count, aux->func_cnt);
	READ(parts, aux->func);
	write_row(context->meta->seq, row, aux);
	for (u32 index = 1; index < MAX_FUNCTIONS && index < count; index++) {
		if (probe_read_kernel(&part, sizeof(part), parts + index) || READ(aux, part->aux))
			break;
		write_row(context->meta->seq, row, aux);
	}
	return 0;
}

char license_text[] __attribute__((section("license"), used)) = "Dual BSD/GPL";
