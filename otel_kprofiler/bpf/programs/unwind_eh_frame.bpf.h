// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Interprets .eh_frame: its search table, CIEs, FDEs and CFA programs.
 *
 * Formats: LSB Core, "Exception Frames"; DWARF 5, 6.4. Tables are not trusted: offsets are confined
 * to .eh_frame, loops are bounded, and an unknown instruction ends a CFA program. Besides sp, fp
 * and the return address, only callee-saved registers are tracked.
 */
#pragma once

#include "unwind_types.bpf.h"

enum {
	DW_CFA_advance_loc = 1, /* in the upper two bits; all other opcodes fill a byte */
	DW_CFA_offset = 2,
	DW_CFA_restore = 3,
	DW_CFA_nop = 0x00,
	DW_CFA_advance_loc1 = 0x02,
	DW_CFA_advance_loc2 = 0x03,
	DW_CFA_advance_loc4 = 0x04,
	DW_CFA_offset_extended = 0x05,
	DW_CFA_restore_extended = 0x06,
	DW_CFA_undefined = 0x07,
	DW_CFA_same_value = 0x08,
	DW_CFA_register = 0x09,
	DW_CFA_remember_state = 0x0a,
	DW_CFA_restore_state = 0x0b,
	DW_CFA_def_cfa = 0x0c,
	DW_CFA_def_cfa_register = 0x0d,
	DW_CFA_def_cfa_offset = 0x0e,
	DW_CFA_def_cfa_expression = 0x0f,
	DW_CFA_expression = 0x10,
	DW_CFA_offset_extended_sf = 0x11,
	DW_CFA_def_cfa_sf = 0x12,
	DW_CFA_def_cfa_offset_sf = 0x13,
	DW_CFA_val_offset = 0x14,
	DW_CFA_val_offset_sf = 0x15,
	DW_CFA_val_expression = 0x16,
	DW_CFA_AARCH64_negate_ra_state = 0x2d, /* pointer signatures are always masked off */
	DW_CFA_GNU_args_size = 0x2e,
	DW_CFA_GNU_negative_offset_extended = 0x2f,
	DW_OP_deref = 0x06,
	DW_OP_plus_uconst = 0x23,
	DW_OP_breg0 = 0x70,
	DW_EH_PE_FORMAT = 0x0f,
	FRAMES_SLACK = 512, /* number of zero bytes that follow .eh_frame in a table */
	WORK_PER_SEARCH = 20, /* cost of a search, including reads of the FDE and its CIE */
	WORK_PER_SEARCH_STEP = 4, /* cost of a search step, which reads another cache line */
	ENTRY_BYTES = 64, /* total size of the dynamic linker's _start and _dl_start_user */
};

/* Loads a window of the current table, starting at `at`; returns 0 on success. */
INLINE int load_window(struct unwind_work *w, u32 at)
{
	void *table = bpf_map_lookup_elem(&tables, &w->slot);
	u32 zero = 0;
	u8 *first;

	if (!table)
		return 1;
	first = bpf_map_lookup_elem(table, &zero);
	if (!first)
		return 1;
	w->window_at = at;
	w->position = 0;
	/* Array elements are contiguous, and more than a window of zeros follows .eh_frame. */
	return bpf_probe_read_kernel(w->window, WINDOW + MARGIN,
				     first + (at & MAX_TABLE_BYTES)) != 0;
}

INLINE u64 peek(const struct unwind_work *w, u64 position)
{
	BOUND(position, 2 * WINDOW - 1);
	return *(const u64 *)((const u8 *)w->window + position);
}

/*
 * Decodes the LEB128 at the low end of x; returns its length, or 0 if it is longer than four bytes.
 */
INLINE u32 uleb(u64 x, u64 *value)
{
	*value = x & 0x7f;
	if (!(x & 0x80))
		return 1;
	*value |= x >> 1 & 0x3f80;
	if (!(x & 0x8000))
		return 2;
	*value |= x >> 2 & 0x1fc000;
	if (!(x & 0x800000))
		return 3;
	*value |= x >> 3 & 0xfe00000;
	return x & 0x80000000 ? 0 : 4;
}

INLINE u32 sleb(u64 x, s64 *value)
{
	u64 raw;
	u32 length = uleb(x, &raw), unused = (64 - 7 * length) & 63;

	*value = (s64)(raw << unused) >> unused;
	return length;
}

INLINE void set_rule(struct unwind_work *w, const struct unwind_config *c, u64 column, u8 kind,
		     u8 from, s64 offset)
{
	if (column == c->fp_column) {
		w->row.fp = kind;
		w->row.fp_column = from;
		w->row.fp_offset = offset;
	} else if (column == c->ra_column) {
		w->row.ra = kind;
		w->row.ra_column = from;
		w->row.ra_offset = offset;
	} else if (column == c->sp_column) {
		w->row.sp = kind;
	} else {
		u32 place = c->preserved[column & (MAX_COLUMNS - 1)];
		s64 words = kind == SAME ? STILL_THERE : offset >> 3;

		if (kind > AT_CFA || offset & 7 || words <= LOST || (kind == AT_CFA && words >= 0))
			words = LOST;
		w->row.preserved[place & (MAX_PRESERVED - 1)] = words;
	}
}

INLINE void restore_rule(struct unwind_work *w, const struct unwind_config *c, u64 column)
{
	const struct row *from = &w->initial;

	if (column == c->fp_column)
		set_rule(w, c, column, from->fp, from->fp_column, from->fp_offset);
	else if (column == c->ra_column)
		set_rule(w, c, column, from->ra, from->ra_column, from->ra_offset);
	else if (column == c->sp_column)
		w->row.sp = from->sp;
	else {
		u32 place = c->preserved[column & (MAX_COLUMNS - 1)] & (MAX_PRESERVED - 1);

		w->row.preserved[place] = from->preserved[place];
	}
}

INLINE int set_cfa(struct unwind_work *w, u64 column, s64 offset)
{
	w->row.cfa_kind = CFA_REGISTER;
	w->row.cfa_column = column & (MAX_COLUMNS - 1);
	w->row.cfa_offset = offset;
	return column >= MAX_COLUMNS;
}

/*
 * Decodes DW_OP_bregN and its offset in the low bytes of x; returns their length, or 0 if absent.
 */
INLINE u32 base_register(u64 x, u8 *column, s64 *offset)
{
	u32 number = (x & 0xff) - DW_OP_breg0, length = sleb(x >> 8, offset);

	*column = number;
	return number > 31 || !length ? 0 : 1 + length;
}

/*
 * Sets the CFA from an expression (bytes: x) of a form that compilers, linkers or go_frames.py
 * emit.
 */
INLINE int set_cfa_expression(struct unwind_work *w, const struct unwind_config *c, u64 x, u32 bytes)
{
	s64 offset;
	u8 column;
	u32 length;

	/* breg7 8; breg16 0; lit15; and; litN; ge; lit3; shl; plus: an x86-64 PLT entry */
	if ((x & 0xff00ffffffffffffULL) == 0x2a001a3f00800877ULL && bytes == 11) {
		w->row.cfa_kind = CFA_PLT;
		w->row.cfa_column = c->sp_column;
		w->row.cfa_offset = 8;
		w->row.post = (x >> 48 & 0xff) - 0x30;
		return 0;
	}
	/* breg7 N + 8; deref; plus_uconst 8; deref; breg7 N; deref; minus; plus_uconst 16 */
	if ((x & 0xffffffffff00ffULL) == 0x77060823060077ULL && bytes == 12) {
		w->row.cfa_kind = CFA_GOROUTINE; /* from go_x86.py */
		w->row.cfa_column = c->sp_column;
		w->row.cfa_offset = x >> 56;
		w->row.post = 16;
		return 0;
	}
	/* breg31 0; deref; plus_uconst 8; deref; breg31 8; deref; minus; plus_uconst 16 */
	if (x == 0x088f06082306008fULL && bytes == 12) {
		w->row.cfa_kind = CFA_GOROUTINE_A64; /* from go_arm64.py */
		w->row.cfa_column = c->sp_column;
		w->row.cfa_offset = 0;
		w->row.post = 16;
		return 0;
	}
	/* bregN offset; deref; perhaps plus_uconst: a realigned stack */
	length = base_register(x, &column, &offset);
	if (!length)
		return 1;
	w->row.cfa_column = column;
	w->row.cfa_offset = offset;
	w->row.post = 0;
	/* go_x86.py and go_arm64.py mark a CFA on another stack with a single bregN operation */
	if (bytes == length) {
		w->row.cfa_kind = CFA_ELSEWHERE;
		return 0;
	}
	x = x >> (8 * length & 63);
	if ((x & 0xff) != DW_OP_deref)
		return 1;
	w->row.cfa_kind = CFA_DEREFERENCED;
	if (bytes == length + 1)
		return 0;
	w->row.post = x >> 16 & 0x7f;
	return bytes != length + 3 || (x >> 8 & 0xff) != DW_OP_plus_uconst || x >> 16 & 0x80;
}

/*
 * Decodes operands and sets the rule; returns the instruction's length, or 0 if the instruction is
 * unsupported.
 */
INLINE u32 set_offset(struct unwind_work *w, const struct unwind_config *c, u64 x, u32 op)
{
	u64 column, raw;
	s64 offset;
	u32 first = uleb(x, &column), second;

	if (first != 1)
		return 0;
	if (op == DW_CFA_offset_extended_sf || op == DW_CFA_val_offset_sf) {
		second = sleb(x >> 8, &offset);
	} else {
		second = uleb(x >> 8, &raw);
		offset = op == DW_CFA_GNU_negative_offset_extended ? -(s64)raw : (s64)raw;
	}
	if (!second)
		return 0;
	offset *= w->data_align;
	if (op == DW_CFA_val_offset || op == DW_CFA_val_offset_sf) {
		/* Without a rule, sp becomes the CFA. */
		if (column != c->sp_column || offset)
			set_rule(w, c, column, NOT_UNDERSTOOD, 0, 0);
	} else {
		set_rule(w, c, column, AT_CFA, 0, offset);
	}
	return 2 + second;
}

INLINE u32 set_expression(struct unwind_work *w, const struct unwind_config *c, u64 x, u32 op)
{
	u64 column = x & 0xff, bytes = x >> 8 & 0xff;
	s64 offset;
	u8 from;

	if ((column | bytes) & 0x80)
		return 0;
	if (op == DW_CFA_expression && base_register(x >> 16, &from, &offset) == bytes)
		set_rule(w, c, column, AT_REGISTER, from, offset);
	else
		set_rule(w, c, column, NOT_UNDERSTOOD, 0, 0);
	return 3 + bytes;
}

enum progress { PROGRAM_DONE, PROGRAM_GOES_ON, PROGRAM_FAILED };

/* Executes a few instructions of the CFA program in the window, from `position` on. */
GLOBAL int run_operations(void)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();

	if (!w || !c)
		return PROGRAM_FAILED;
#pragma clang loop unroll(disable)
	for (int i = 0; i < OPS_PER_CALL; i++) {
		u32 position = *(volatile u32 *)&w->position;
		u64 x, value = 0;
		s64 offset;
		u32 op, length = 0;

		if (w->window_at + position >= w->program_end)
			return PROGRAM_DONE;
		if (position >= WINDOW)
			return PROGRAM_GOES_ON; /* a skipped expression extends beyond the window */
		w->spent++;
		x = peek(w, position);
		op = x & 0xff;
		x >>= 8;
		if (op >> 6) {
			value = op & 0x3f;
			op >>= 6;
			if (op == DW_CFA_advance_loc) {
				w->location += value * w->code_align;
				if (w->location > w->target)
					return PROGRAM_DONE;
				length = 1;
			} else if (op == DW_CFA_restore) {
				restore_rule(w, c, value);
				length = 1;
			} else {
				u64 raw;

				length = uleb(x, &raw);
				set_rule(w, c, value, AT_CFA, 0, (s64)raw * w->data_align);
				length += !!length;
			}
		} else if (op == DW_CFA_nop || op == DW_CFA_AARCH64_negate_ra_state) {
			length = 1;
		} else if (op >= DW_CFA_advance_loc1 && op <= DW_CFA_advance_loc4) {
			length = 1 << (op - DW_CFA_advance_loc1);
			value = op == DW_CFA_advance_loc1   ? x & 0xff
				: op == DW_CFA_advance_loc2 ? x & 0xffff
							    : x & 0xffffffff;
			w->location += value * w->code_align;
			if (w->location > w->target)
				return PROGRAM_DONE;
			length++;
		} else if (op == DW_CFA_def_cfa_offset) {
			length = uleb(x, &value);
			w->row.cfa_offset = value;
			if (w->row.cfa_kind != CFA_REGISTER)
				length = 0;
			length += !!length;
		} else if (op == DW_CFA_def_cfa_offset_sf) {
			length = sleb(x, &offset);
			w->row.cfa_offset = offset * w->data_align;
			if (w->row.cfa_kind != CFA_REGISTER)
				length = 0;
			length += !!length;
		} else if (op == DW_CFA_def_cfa_register) {
			length = w->row.cfa_kind != CFA_REGISTER ? 0 : 2;
			if (set_cfa(w, x & 0xff, w->row.cfa_offset))
				length = 0;
		} else if (op == DW_CFA_def_cfa) {
			length = uleb(x >> 8, &value);
			if (set_cfa(w, x & 0xff, value))
				length = 0;
			length += 2 * !!length;
		} else if (op == DW_CFA_def_cfa_sf) {
			length = sleb(x >> 8, &offset);
			if (set_cfa(w, x & 0xff, offset * w->data_align))
				length = 0;
			length += 2 * !!length;
		} else if (op == DW_CFA_def_cfa_expression) {
			length = x & 0xff; /* length of the expression: below 128 */
			if (length & 0x80 || set_cfa_expression(w, c, peek(w, position + 2), length))
				return PROGRAM_FAILED;
			length += 2;
		} else if (op == DW_CFA_remember_state) {
			u32 depth = w->depth++;

			if (depth >= MAX_STATES)
				return PROGRAM_FAILED;
			w->state[depth & (MAX_STATES - 1)] = w->row;
			length = 1;
		} else if (op == DW_CFA_restore_state) {
			u32 depth = --w->depth;

			if (depth >= MAX_STATES)
				return PROGRAM_FAILED;
			w->row = w->state[depth & (MAX_STATES - 1)];
			length = 1;
		} else if (op == DW_CFA_offset_extended || op == DW_CFA_offset_extended_sf ||
			   op == DW_CFA_val_offset || op == DW_CFA_val_offset_sf ||
			   op == DW_CFA_GNU_negative_offset_extended) {
			length = set_offset(w, c, x, op);
		} else if (op == DW_CFA_expression || op == DW_CFA_val_expression) {
			length = set_expression(w, c, x, op);
		} else if (op == DW_CFA_restore_extended || op == DW_CFA_undefined ||
			   op == DW_CFA_same_value) {
			if (!(x & 0x80))
				length = 2;
			if (op == DW_CFA_restore_extended)
				restore_rule(w, c, x & 0x7f);
			else
				set_rule(w, c, x & 0x7f, op == DW_CFA_undefined ? UNDEFINED : SAME, 0, 0);
		} else if (op == DW_CFA_register) {
			if (!(x & 0x8080))
				length = 3;
			set_rule(w, c, x & 0x7f, IN_REGISTER, x >> 8 & 0x7f, 0);
		} else if (op == DW_CFA_GNU_args_size) {
			length = uleb(x, &value);
			length += !!length;
		}
		if (!length)
			return PROGRAM_FAILED;
		w->position = position + length;
	}
	return PROGRAM_GOES_ON;
}

/*
 * Executes instructions of the CFA program from `position` on. Execution is complete at the end of
 * the program, or when the next row is beyond the target address.
 */
GLOBAL int run_window(void)
{
	struct unwind_work *w = get_work();
	int progress = PROGRAM_GOES_ON;

	if (!w)
		return PROGRAM_FAILED;
	if (w->window_at + w->position >= w->program_end)
		return PROGRAM_DONE;
	if (w->position >= WINDOW - OPS_PER_WINDOW * 4 &&
	    load_window(w, w->window_at + w->position))
		return PROGRAM_FAILED;
#pragma clang loop unroll(disable)
	for (int i = 0; i < OPS_PER_WINDOW / OPS_PER_CALL && progress == PROGRAM_GOES_ON; i++)
		progress = run_operations();
	return progress;
}

/* Runs a CFA program to its end; returns a value of enum rule_errors. */
INLINE int run_program(struct unwind_work *w, const struct unwind_config *c)
{
	int progress = PROGRAM_GOES_ON;

	w->depth = 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < MAX_WINDOWS; i++) {
		progress = run_window();
		if (progress != PROGRAM_GOES_ON)
			break;
		if (w->spent > c->max_work)
			return RULE_WORK;
	}
	return progress == PROGRAM_DONE ? RULE_FOUND : RULE_UNSUPPORTED;
}

/* Returns the size of a pointer in this encoding; 0 if it is unknown. */
INLINE u32 pointer_bytes(u64 encoding)
{
	u64 format = encoding & 7; /* without DW_EH_PE_signed */

	if (format == 0 || format == 4)
		return 8;
	return format == 3 ? 4 : format == 2 ? 2 : 0;
}

/* Reads the CIE at an offset in the table, and runs its initial instructions to set `initial`. */
GLOBAL int read_cie(u32 at)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	u64 x, value;
	s64 factor;
	u32 length, position, data, bytes;

	if (!w || !c || load_window(w, at))
		return RULE_DAMAGED;
	x = peek(w, 0);
	if (x >> 32) /* a CIE has the id 0 */
		return RULE_DAMAGED;
	w->program_end = at + 4 + (u32)x;
	if ((u32)x > PAGE || w->program_end - w->frames_at > w->frames_bytes)
		return RULE_DAMAGED;
	x = peek(w, 8);
	if ((x & 0xff) != 1 && (x & 0xff) != 3)
		return RULE_UNSUPPORTED;
	w->augmented = (x >> 8 & 0xff) == 'z';
	if (!w->augmented && x >> 8 & 0xff)
		return RULE_UNSUPPORTED;
	/*
	 * Skip the augmentation string, which precedes the alignment factors and the return address
	 * register.
	 */
	w->low = 9;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 8; i++) {
		position = *(volatile u32 *)&w->low;
		w->low = position + 1;
		if (!(peek(w, position) & 0xff))
			break;
	}
	position = *(volatile u32 *)&w->low;
	length = uleb(peek(w, position), &value);
	w->code_align = value;
	position += length;
	if (!length)
		return RULE_UNSUPPORTED;
	length = sleb(peek(w, position), &factor);
	w->data_align = factor;
	position += length;
	if (!length || (peek(w, position) & 0xff) != c->ra_column)
		return RULE_UNSUPPORTED;
	position++;
	w->pointer_bytes = 8;
	w->cie_signal = w->cie_disassembled = 0;
	if (w->augmented) {
		length = uleb(peek(w, position), &value);
		if (!length || value > WINDOW / 2)
			return RULE_UNSUPPORTED;
		position += length;
		w->position = position + value;
		w->count = position;
		w->low = 10; /* offset of the augmentation letter after 'z' */
#pragma clang loop unroll(disable)
		for (int i = 0; i < 6; i++) {
			u64 letter;

			position = *(volatile u32 *)&w->low;
			data = *(volatile u32 *)&w->count;
			letter = peek(w, position) & 0xff;
			if (!letter)
				break;
			w->low = position + 1;
			x = peek(w, data);
			bytes = 0;
			if (letter == 'R') {
				w->pointer_bytes = pointer_bytes(x);
				bytes = 1;
			} else if (letter == 'P') {
				bytes = 1 + pointer_bytes(x);
			} else if (letter == 'L') {
				bytes = 1;
			} else if (letter == 'S') {
				w->cie_signal = 1;
			} else if (letter == 'D') { /* of code_frames.py */
				w->cie_disassembled = 1;
			} else if (letter != 'B' && letter != 'G') { /* B: PAuth key B, G: MTE */
				return RULE_UNSUPPORTED;
			}
			w->count = data + bytes;
		}
		if (!w->pointer_bytes)
			return RULE_UNSUPPORTED;
	} else {
		w->position = position;
	}
	w->row = (struct row){ .signal = w->cie_signal, .disassembled = w->cie_disassembled };
	w->location = 0;
	w->target = ~0ULL;
	if (run_program(w, c) != RULE_FOUND)
		return RULE_UNSUPPORTED;
	w->initial = w->row;
	return RULE_FOUND;
}

/* Sets `low` to the index of the last search table entry that starts at or before an address. */
INLINE int search(struct unwind_work *w, void *table, s32 relative)
{
#pragma clang loop unroll(disable)
	for (int i = 0; i < MAX_SEARCH; i++) {
		u32 half = w->count >> 1, middle = w->low + half;
		u32 at = TABLE_HEADER_BYTES + middle * 8, page = at / PAGE;
		s32 *entries;

		if (!half)
			break;
		w->spent += WORK_PER_SEARCH_STEP;
		entries = bpf_map_lookup_elem(table, &page);
		if (!entries)
			return RULE_DAMAGED;
		if (entries[(at & (PAGE - 1)) >> 2] <= relative)
			w->low = middle;
		w->count -= half;
	}
	return RULE_FOUND;
}

/*
 * Handles an address for which the table has no rule. At the entry point, whose frame is the
 * outermost, sets a row that ends the stack, and returns RULE_FOUND. Elsewhere, returns RULE_NONE.
 */
INLINE u32 without_rule(struct unwind_work *w, const struct table_header *header, u64 address)
{
	if (!header->entry || address - header->entry >= ENTRY_BYTES)
		return RULE_NONE;
	w->row = (struct row){ .ra = UNDEFINED };
	return RULE_FOUND;
}

/* Sets `row` for an address in the current mapping's file; returns one of enum rule_errors. */
GLOBAL int read_row(u64 address)
{
	struct unwind_work *w = get_work();
	struct unwind_config *c = get_unwind_config();
	const struct table_header *header;
	const struct mapping *m;
	void *table;
	u64 start, range, value, relative;
	s64 fde_address;
	u32 zero = 0, at, page, fde, cie, length, error;
	s32 *entry;

	if (!w || !c)
		return RULE_DAMAGED;
	m = &w->kept[w->at & (KEPT_MAPPINGS - 1)];
	w->slot = m->slot;
	w->spent += WORK_PER_SEARCH;
	table = bpf_map_lookup_elem(&tables, &w->slot);
	if (!table)
		return RULE_GONE;
	header = bpf_map_lookup_elem(table, &zero);
	if (!header || header->serial != m->serial)
		return RULE_GONE;
	w->frames_at = header->frames_at;
	w->frames_bytes = header->frames_bytes;
	relative = address - header->header_address;
	if ((relative + 0x80000000ULL) >> 32) /* beyond the range of the search table */
		return RULE_NONE;
	w->low = 0;
	w->count = header->entries;
	if (search(w, table, relative))
		return RULE_DAMAGED;
	at = TABLE_HEADER_BYTES + w->low * 8;
	page = at / PAGE;
	entry = bpf_map_lookup_elem(table, &page);
	if (!entry)
		return RULE_DAMAGED;
	at = (at & (PAGE - 1)) >> 2;
	start = header->header_address + (s64)entry[at];
	fde_address = header->header_address + (s64)entry[(at + 1) & (PAGE / 4 - 1)];
	if (address < start)
		return without_rule(w, header, address);
	value = fde_address - header->frames_address;
	if (value >= w->frames_bytes)
		return RULE_DAMAGED;
	fde = w->frames_at + value;
	if (load_window(w, fde))
		return RULE_GONE;
	/* The second word of an FDE is the distance back to its CIE. */
	cie = fde + 4 - (u32)(peek(w, 0) >> 32);
	if (cie - w->frames_at >= w->frames_bytes)
		return RULE_DAMAGED;
	if (w->cie_at != cie || w->cie_serial != m->serial) {
		w->cie_serial = 0;
		error = read_cie(cie);
		if (error)
			return w->spent > c->max_work ? RULE_WORK : error;
		w->cie_at = cie;
		w->cie_serial = m->serial;
		if (load_window(w, fde))
			return RULE_GONE;
	}
	w->row = w->initial;
	length = peek(w, 0);
	w->program_end = fde + 4 + length;
	if (length > MAX_TABLE_BYTES || w->program_end - w->frames_at > w->frames_bytes)
		return RULE_DAMAGED;
	range = peek(w, 8 + w->pointer_bytes);
	if (w->pointer_bytes < 8)
		range &= (1ULL << (8 * w->pointer_bytes & 63)) - 1;
	if (address - start >= range)
		return without_rule(w, header, address);
	w->position = 8 + 2 * w->pointer_bytes;
	if (w->augmented) {
		length = uleb(peek(w, w->position), &value);
		if (!length)
			return RULE_UNSUPPORTED;
		w->position += length + value;
	}
	w->location = start;
	w->target = address;
	return run_program(w, c);
}

/* Returns the cache entry that may hold the rule of an address in the current mapping's file. */
INLINE struct rule *find_entry(struct unwind_work *w, u64 address)
{
	struct mapping *m = &w->kept[w->at & (KEPT_MAPPINGS - 1)];
	u32 cpu = w->cpu;
	struct rules *cache = LOOKUP(rules, &cpu);

	if (!cache)
		return 0;
	w->low = (address ^ address >> 13 ^ m->serial * 0x9e5) & (RULES - 1);
	return &cache->rule[*(volatile u32 *)&w->low & (RULES - 1)];
}

INLINE int is_entry_of(const struct rule *rule, const struct mapping *m, u64 address)
{
	return rule->key == (address << 32 | m->serial) && rule->high == address >> 32;
}

/* Sets `rule` to the rule for an address in the current mapping's file. */
GLOBAL int find_rule(u64 address)
{
	struct unwind_work *w = get_work();
	struct mapping *m;
	struct rule *rule;
	u32 error;

	if (!w)
		return RULE_GONE;
	m = &w->kept[w->at & (KEPT_MAPPINGS - 1)];
	rule = find_entry(w, address);
	if (!rule)
		return RULE_GONE;
	if (is_entry_of(rule, m, address)) {
		if (w->after_call && !rule->after_call)
			rule->after_call = 1;
		w->rule = *rule;
		return rule->error;
	}
	error = read_row(address);
	w->rule.key = address << 32 | m->serial;
	w->rule.high = address >> 32;
	w->rule.row = w->row;
	w->rule.error = error;
	w->rule.after_call = w->after_call;
	if (error != RULE_GONE && error != RULE_WORK)
		*rule = w->rule;
	return error;
}
