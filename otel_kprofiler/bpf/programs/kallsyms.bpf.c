// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Writes what /proc/kallsyms says, in its format, but with the addresses: a process that may
 * load this program sees them whatever kernel.kptr_restrict is. Kernel 6.0 or newer.
 *
 * Only members that are named here are read; the loader finds their offsets in the running
 * kernel's BTF.
 */

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
	NAME_BYTES = 512,  /* KSYM_NAME_LEN; 128 until 6.0 */
	MODULE_BYTES = 56, /* MODULE_NAME_LEN */
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct kallsym_iter {
	unsigned long value;
	char type;
	char name[NAME_BYTES];
	char module_name[MODULE_BYTES];
};

struct bpf_iter_meta {
	void *seq;
};

struct bpf_iter__ksym {
	struct bpf_iter_meta *meta;
	struct kallsym_iter *ksym;
};
#pragma clang attribute pop

static long (*seq_printf)(void *, const char *, u32, const void *, u32) = (void *)126;

__attribute__((section("iter/ksym"), used))
int list_symbols(struct bpf_iter__ksym *context)
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
		seq_printf(context->meta->seq, module, sizeof(module), values, 32);
	else
		seq_printf(context->meta->seq, core, sizeof(core), values, 24);
	return 0;
}

char license_text[] __attribute__((section("license"), used)) = "Dual BSD/GPL";
