// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Lists kernel symbols for a process that may load BPF programs (CAP_BPF and CAP_PERFMON) but
 * cannot read kernel addresses from /proc (neither CAP_SYS_ADMIN nor CAP_SYSLOG).
 *
 * list_programs writes the functions in all BPF programs. program_iterator.py reads
 * the output; change both files together. list_symbols writes the content of /proc/kallsyms
 * in that file's format, and needs Linux 6.0. Loaders load only the programs that they
 * need.
 *
 * Structs contain only the members that are read; libbpf finds their offsets in the running
 * kernel's BTF.
 */

#include "loaders.bpf.h"

enum {
	MAX_FUNCTIONS = 256, /* BPF_MAX_SUBPROGS, kernel/bpf/verifier.c */
	NAME_BYTES = 512,    /* KSYM_NAME_LEN (128 until 6.0, with shorter names) */
	MODULE_BYTES = 56,   /* MODULE_NAME_LEN */
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct bpf_iter_meta {
	void *seq;
};

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

struct bpf_iter__bpf_prog {
	struct bpf_iter_meta *meta;
	struct bpf_prog *prog;
};

struct kallsym_iter {
	unsigned long value;
	char type;
	char name[NAME_BYTES];
	char module_name[MODULE_BYTES];
};

struct bpf_iter__ksym {
	struct bpf_iter_meta *meta;
	struct kallsym_iter *ksym;
};
#pragma clang attribute pop

struct row {
	u64 start;
	u64 end;
	u64 load_time;
	u32 id;
	u32 name_bytes; /* length of the name, including the final zero */
	char name[NAME_BYTES];
};

SCRATCH(rows, struct row);

#define READ(into, from) bpf_probe_read_kernel(&(into), sizeof(into), &(from))

static void write_row(void *seq, struct row *row, struct bpf_prog_aux *aux)
{
	unsigned long length;

	READ(row->start, aux->ksym.start);
	READ(row->end, aux->ksym.end);
	length = bpf_probe_read_kernel_str(row->name, NAME_BYTES, &aux->ksym.name);
	if (length < 2 || length > NAME_BYTES)
		return; /* no name: the program has no machine code */
	row->name_bytes = length;
	bpf_seq_write(seq, row, sizeof(*row) - NAME_BYTES + length);
}

PROGRAM("iter/bpf_prog") int list_programs(struct bpf_iter__bpf_prog *context)
{
	struct bpf_prog *program = context->prog, *part;
	struct bpf_prog_aux *aux;
	struct bpf_prog **parts;
	u32 first = 0, count = 0;
	struct row *row;

	row = LOOKUP(rows, &first);
	if (!program || !row)
		return 0;
	READ(aux, program->aux);
	READ(row->id, aux->id);
	READ(row->load_time, aux->load_time);
	READ(count, aux->func_cnt);
	READ(parts, aux->func);
	write_row(context->meta->seq, row, aux);
	for (u32 index = 1; index < MAX_FUNCTIONS && index < count; index++) {
		if (bpf_probe_read_kernel(&part, sizeof(part), parts + index) ||
		    READ(aux, part->aux))
			break;
		write_row(context->meta->seq, row, aux);
	}
	return 0;
}

PROGRAM("iter/ksym") int list_symbols(struct bpf_iter__ksym *context)
{
	static const char core[] = "%016lx %c %s\n";
	static const char module[] = "%016lx %c %s\t[%s]\n";
	struct kallsym_iter *symbol = context->ksym;
	u64 values[4];

	if (!symbol)
		return 0;
	values[0] = symbol->value;
	values[1] = symbol->type;
	values[2] = (u64)symbol->name;
	values[3] = (u64)symbol->module_name;
	if (symbol->module_name[0])
		bpf_seq_printf(context->meta->seq, module, sizeof(module), values, 32);
	else
		bpf_seq_printf(context->meta->seq, core, sizeof(core), values, 24);
	return 0;
}
