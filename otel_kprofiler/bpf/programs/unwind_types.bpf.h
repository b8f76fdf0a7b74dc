// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Maps, settings and state of the user stack unwinder.
 *
 * For each file, user space copies .eh_frame and the search table from .eh_frame_hdr into `tables`,
 * and the BPF program interprets them. unwind.py reads and writes the structs up to
 * `unwind_config`; keep the two files in sync. This file does not depend on the architecture:
 * registers, alignment and instruction encodings are part of the settings.
 */
#pragma once

#include "user_stack.bpf.h"

enum {
	PAGE = 4096,	     /* value size of a table map */
	MAX_TEXTS = 4,
	TABLE_HEADER_BYTES = 256,
	MAX_SEARCH = 28,     /* maximum steps of a binary search */
	MAX_TABLE_BYTES = 0x0fffffff,
	WINDOW = 256,	     /* table bytes loaded at a time; a power of two */
	MARGIN = 16,	     /* length of the longest known instruction */
	OPS_PER_CALL = 4,
	OPS_PER_WINDOW = 16,
	MAX_WINDOWS = 192,
	MAX_STATES = 4,	     /* nested DW_CFA_remember_state */
	RULES = 2048,	     /* rules cached per CPU */
	KEPT_MAPPINGS = 16,  /* mappings cached per CPU */
	MAX_COLUMNS = 64,    /* supported DWARF register numbers */
	MAX_PRESERVED = 16,  /* indices of callee-saved registers; index 0: any other register */
	MAX_BLOCK_BYTES = 512,
};

enum file_states {
	FILE_PENDING,
	FILE_LOADED,
	FILE_NO_TABLE,	  /* the unwinder may follow frame pointers */
	FILE_UNAVAILABLE, /* the table is unusable; do not follow frame pointers */
	NO_FILE,	  /* anonymous memory; used only in struct mapping */
};

enum unwind_flags {
	A64_CALLS = 1,	   /* calls are BL and BLR; if unset, x86-64 calls */
	LINK_REGISTER = 2, /* a leaf function's return address is in a register */
	KEEP_MAPPINGS = 4, /* mappings are cached; mm_sequence shows whether they are still valid */
	RB_TREE = 8,	   /* mappings are in a red-black tree, not in a maple tree */
};

struct file_state {
	u32 state;
	u32 slot;
	u32 serial;
	u32 reserved;
};

struct file_request {
	struct file_key key;
	u64 start;
	u64 end;
	u64 file_offset;
	u32 tgid;
	u32 tid;
	u64 file_bytes;
	u64 file_modified; /* seconds << 32 | nanoseconds */
};

struct table_header {
	u32 serial; /* unique to this table */
	u32 version;
	u64 header_address; /* base address of the search table */
	u64 frames_address; /* address of .eh_frame */
	u32 entries;	    /* number of entries in the search table */
	u32 frames_at;	    /* offset of .eh_frame in the map */
	u32 frames_bytes;
	u32 texts;
	struct {
		u64 offset; /* offset in the file */
		u64 bytes;
		u64 delta; /* address - offset */
	} text[MAX_TEXTS];
	u64 entry; /* first instruction of a program or of the dynamic linker; 0: none */
};

/* Offsets of the registers in a saved register block, by DWARF number. */
struct register_block {
	u16 bytes;
	u16 sp_at;
	u16 fp_at;
	u16 pc_at;
	u16 at[MAX_COLUMNS]; /* MAX_BLOCK_BYTES: unknown */
};

struct unwind_config {
	u64 address_mask; /* address bits of a return address; the bits above may hold a PAC */
	u64 sigreturn;	  /* first bytes of a signal trampoline */
	u64 syscall;	  /* the system call instruction */
	u64 goexit;	  /* code in runtime.goexit around the return address; 0: none */
	u64 goexit_mask;
	u32 flags;
	u32 max_work;
	u32 syscall_bytes;
	u32 goexit_back;
	u32 sigreturn_bytes; /* length of a signal trampoline up to the end of its system call */
	u32 signal_at; /* offset of the signal frame's registers from the stack pointer */
	u32 sp_column; /* DWARF numbers of sp, fp and the return address */
	u32 fp_column;
	u32 ra_column;
	u32 mode_at; /* offset in pt_regs of the word that contains the processor mode */
	u32 user_mask;
	u32 user_value;
	u32 narrow_mask; /* mode bits that equal narrow_value in 32-bit code */
	u32 narrow_value;
	u32 stack_top_registers; /* offset of pt_regs in a task's kernel stack */
	/* offsets in kernel structs */
	u32 task_mm;
	u32 task_stack;
	u32 mm_tree;
	u32 mm_base;
	u32 mm_sequence;
	u32 mm_vdso;
	u32 mm_end_code;
	u32 vma_start;
	u32 vma_end;
	u32 vma_mm;
	u32 vma_flags;
	u32 vma_offset;
	u32 vma_file;
	u32 vma_node;
	u32 file_inode;
	u32 inode_number;
	u32 inode_super;
	u32 inode_generation;
	u32 inode_size;
	u32 inode_mtime_seconds;
	u32 inode_mtime_ns;
	u32 super_device;
	u32 page_bytes; /* page size of the kernel */
	struct register_block interrupt;
	struct register_block signal;
	u8 preserved[MAX_COLUMNS]; /* by DWARF number: index of a callee-saved register, else 0 */
};

/* A row of call frame information: locations of the caller's registers. */
struct row {
	s64 cfa_offset;
	s32 fp_offset;
	s32 ra_offset;
	s32 post; /* added to the dereferenced word; in CFA_PLT, a threshold for pc & 15 */
	u8 cfa_kind;
	u8 cfa_column;
	u8 fp;
	u8 fp_column;
	u8 ra;
	u8 ra_column;
	u8 sp;
	u8 signal;
	s8 preserved[MAX_PRESERVED]; /* distance of callee-saved registers from the CFA, in words */
	u8 disassembled; /* the row was derived from the file's code, not from its tables */
};

enum preserved_places {
	STILL_THERE = 0,
	LOST = -128,
};

enum cfa_kinds {
	CFA_REGISTER,
	CFA_DEREFERENCED, /* *(register + offset) + post */
	CFA_PLT,	  /* x86-64 PLT entry: register + offset, or register + offset + 8 after the push */
	CFA_ELSEWHERE,	  /* register + offset; for this and the following kinds, the CFA is on another stack */
	CFA_GOROUTINE,	  /* computed from two words that Go's asmcgocall saves on x86-64 */
	CFA_GOROUTINE_A64, /* like CFA_GOROUTINE, but for arm64, where the words are in reverse order */
};

enum register_rules {
	SAME,
	AT_CFA,	     /* in memory at CFA + offset */
	AT_REGISTER, /* in memory at register + offset */
	IN_REGISTER,
	UNDEFINED,
	NOT_UNDERSTOOD,
};

enum rule_errors {
	RULE_FOUND,
	RULE_NONE,
	RULE_UNSUPPORTED,
	RULE_DAMAGED,
	RULE_GONE, /* the table was removed during the walk */
	RULE_WORK, /* the work limit was reached */
};

struct rule {
	u64 key; /* lower half of the address, and the table's serial; 0: empty */
	struct row row;
	u16 error;
	u16 after_call; /* the address is in a call instruction */
	u32 high; /* upper half of the address */
};

/* A mapping that contains a pc. */
struct mapping {
	u64 start;
	u64 end;
	u64 bias;
	u64 shift; /* pc - shift is the address in the ELF file, if FILE_LOADED */
	struct file_key key;
	u32 executable;
	u32 moved; /* the mapping is a copy of the file's text in anonymous memory */
	u32 state;
	u32 slot;
	u32 serial;
	u32 sample; /* number of the sample in whose record `index` is valid */
	u32 index;
};

/*
 * State of a stack walk on a CPU. Loops keep their variables here, not on the stack: the verifier
 * does not track values in a map, so all iterations of a loop look the same to it.
 */
struct unwind_work {
	u64 pc;
	u64 sp;
	u64 fp;
	u64 mm;
	u64 vdso; /* start of the vDSO; read on first use */
	u64 file_bytes; /* size of the file whose mapping was last looked up */
	u64 file_modified;
	u64 user_registers; /* address of the thread's pt_regs; 0: at the top of its kernel stack */
	u64 time_ns;
	u32 tgid;
	u32 tid;
	u32 sample;
	u32 cpu;
	u32 max_frames;
	u32 spent; /* work spent, up to max_work */
	u32 end;
	u32 source;	/* how the last frame was found */
	u32 leaf;	/* pc is not a return address */
	u32 after_call; /* pc is known to follow a call instruction */
	u32 registers;	/* enum register_blocks: where the registers were saved */
	u32 called;	/* the block belongs to a callee: only preserved registers are valid */
	u32 fp_lost;
	u32 sp_lost;	/* sp is only a lower bound */
	u32 at;		/* index in kept[] of the mapping that contains pc */
	u32 next_kept;
	/* kept[] is valid while the fields below are unchanged */
	u64 kept_mm;
	u64 kept_base;
	u64 kept_epoch;
	u32 kept_sequence;
	u32 kept_tgid;
	/* interpreter */
	u64 location;
	u64 target;
	u32 slot;
	u32 position;	 /* offset in the window */
	u32 window_at;	 /* offset in the table */
	u32 program_end; /* offset in the table */
	u32 frames_at;	 /* offset of .eh_frame in the table */
	u32 frames_bytes;
	u32 code_align;
	s32 data_align;
	u32 cie_at; /* offset of the CIE that `initial` is computed from; cie_serial: serial number of its table */
	u32 cie_serial;
	u32 pointer_bytes; /* size of a pointer in an FDE */
	u32 augmented;
	u32 cie_signal;
	u32 cie_disassembled;
	u32 depth; /* number of remembered states */
	u32 low;   /* lower bound of the binary search; scratch variable in short loops */
	u32 count;
	struct row row;
	struct row initial;
	struct row state[MAX_STATES];
	struct rule rule;
	struct mapping kept[KEPT_MAPPINGS];
	struct file_request request;
	u64 node[40]; /* node in a mapping tree, or a vm_area_struct */
	u64 pair[2];
	u64 window[2 * WINDOW / 8 + 1];
	u64 block[2 * MAX_BLOCK_BYTES / 8]; /* registers */
	u64 preserved[MAX_PRESERVED]; /* addresses of saved registers; 0: not saved, but in `block`; 1: lost */
	/* the members below are copied into the record */
	struct stack_head head;
	struct stack_mapping mapping[STACK_MAPPINGS + 1];
	u64 frame[MAX_USER_FRAMES + 1];
};

enum register_blocks {
	NO_BLOCK, /* only pc, sp and fp are known */
	INTERRUPT_BLOCK,
	SIGNAL_BLOCK,
};

struct rules {
	struct rule rule[RULES];
};

ARRAY(unwind_config, struct unwind_config, 1);
SCRATCH(unwind_work, struct unwind_work);
/* Not a per-CPU map, in which a CPU's elements would not be adjacent. */
ARRAY(rules, struct rules, SIZED_BY_LOADER);
HASH_OF(files, struct file_key, struct file_state, SIZED_BY_LOADER);
MMAP_ARRAY(table_used, u64, SIZED_BY_LOADER);
MMAP_ARRAY(table_epoch, u64, 1);
ARRAY_OF_TABLES(tables, PAGE, SIZED_BY_LOADER);
RING(file_requests);

INLINE struct unwind_work *get_work(void)
{
	u32 zero = 0;

	return LOOKUP(unwind_work, &zero);
}

INLINE struct unwind_config *get_unwind_config(void)
{
	u32 zero = 0;

	return LOOKUP(unwind_config, &zero);
}
