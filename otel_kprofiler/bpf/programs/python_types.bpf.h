// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Defines the maps, settings and state for reading CPython frames. python.py and python_codes.py
 * read and write the structs up to `code_description`; change all three together.
 */
#pragma once

#include "loaders.bpf.h"

enum {
	MAX_PYTHON_FRAMES = 127,
	MORE_STEPS = 64,	 /* extra stack walk steps for frames that are not reported */
	PYTHON_STACK_VERSION = 1,
	MAX_PYTHON_LAYOUTS = 64,
	MAX_PYTHON_THREADS = 512, /* maximum number of threads that a search examines */
	MAX_PYTHON_INTERPRETERS = 128,
	CHEAP_SEARCH = 16, /* number of threads that can be examined cheaply at each sample */
	THREAD_BYTES = 512,
	FRAME_BYTES = 128,
	FRAME_WINDOW = 1024, /* bytes of the data stack read at once; a power of two */
	CODE_BYTES = 256,
	CODE_ID_BITS = 40,
	CODE_COUNTER_BITS = 27,
	NO_INSTRUCTION = (1 << 22) - 1,
	MAX_NEW_CODES = 32, /* limit on code objects described per interrupt */
	MAX_NEW_BYTES = 1 << 15, /* total size limit for line tables; the first table may exceed it */
	MAX_NAME_BYTES = 508,
	MAX_TABLE_PIECES = 16,
	TABLE_PIECE_BYTES = 4096,
	ASK_AGAIN_NS = 100000000, /* interval for rechecking an unknown thread */
};

/* Initial and maximum intervals between reports on a program whose code keeps changing. */
#define FIRST_WAIT_NS 10000000ULL
#define LONGEST_WAIT_NS 40960000000ULL
/*
 * Minimum age at which waiting processes are reported; running processes are reported at any age.
 */
#define LEAST_AGE_NS 1000000000ULL

#define FROM_C (1ULL << 62) /* flag in a frame's word: the frame was entered from C */

enum python_flags {
	PYTHON_CFRAME = 1, /* the current frame is in a struct on the C stack */
	PYTHON_IS_ENTRY = 2, /* set: a frame flag marks calls from C; clear: entry frames mark calls from C */
};

struct python_config {
	u64 max_frames; /* 0: no frames are read */
	/* offsets in kernel structs */
	u64 number_bytes;
	u64 task_exec_id;
	u64 task_pid;
	u64 pid_level;
	u64 pid_numbers;
	u64 task_mm;
	u64 mm_code_pages;
	u64 mm_exe;
	u64 file_inode;
	u64 inode_super;
	u64 inode_number;
	u64 super_device;
};

/* Locations of an interpreter's data: see PythonLayout in python.py. */
struct python_layout {
	u64 flags;
	u64 interpreters_head;
	u64 interpreter_next;
	u64 interpreter_threads;
	u64 thread_bytes;
	u64 thread_previous;
	u64 thread_next;
	u64 thread_interpreter;
	u64 thread_native;
	u64 thread_status; /* the word that contains the IS_THREADS bit; 0: this version has no such bit */
	u64 thread_frame;
	u64 thread_chunk; /* three words: datastack_chunk, datastack_top and datastack_limit */
	u64 cframe_frame;
	u64 frame_bytes;
	u64 frame_code;
	u64 frame_previous;
	u64 frame_instruction;
	u64 frame_owner;
	u64 frame_entry;
	u64 frame_header; /* bytes in a frame's header; 0 if code_frame_words includes the header */
	u64 entry_owner;  /* frames with this or a higher owner value mark a call from C */
	u64 generator_state_back;
	u64 generator_executing;
	u64 code_bytes; /* size of a code object, excluding its instructions */
	u64 code_traceable;
	u64 code_frame_words;
	u64 code_stack_words;
	u64 code_variables;
	u64 code_version; /* 0: code objects have no version */
	u64 code_first_line;
	u64 code_file;
	u64 code_name;
	u64 code_table;
	u64 string_ascii; /* offset of the characters */
	u64 string_other;
	u64 string_kind_shift;
	u64 string_ascii_shift; /* position of the bit that marks ASCII strings */
};

struct python_process {
	u64 layout;
	u64 tag;
	u64 runtime_at;
	u64 code_type;
	u64 eval_start; /* start of the evaluation loop; the length of its prologue follows */
	u64 eval_bytes;
	u64 image; /* identifies the program; 0 until the first sample */
};

/* Outcomes of reading a stack, and of describing a code object. */
enum python_outcomes {
	PYTHON_COMPLETE,
	PYTHON_TRUNCATED,
	PYTHON_OTHER_IMAGE,  /* the process has executed another program */
	PYTHON_INTERPRETERS, /* too many interpreters, or the thread's interpreter is unknown */
	PYTHON_NO_THREAD,    /* the thread is unknown to Python */
	PYTHON_THREADS,	     /* too many threads */
	PYTHON_NO_FRAME,
	PYTHON_ENTERING,   /* the thread is entering the interpreter's loop */
	PYTHON_UNROOTED,   /* a generator is being linked to its caller */
	PYTHON_UNREADABLE, /* memory that is not resident or not mapped */
	PYTHON_NOT_CODE,
	PYTHON_OUTSIDE,	     /* the instruction is outside its code object */
	PYTHON_NOT_RUNNING,  /* a frame of a generator that is not running */
	PYTHON_UNUSED,	     /* not a plausible frame address */
	PYTHON_NOT_ADJACENT, /* a frame is being created */
	CODE_DESCRIBED,
	CODE_RING_FULL,
	CODE_UNREADABLE,
	CODE_TOO_MANY, /* too many code objects in one interrupt */
	CODE_NO_TABLE, /* described without its line table, which is too large */
	PYTHON_OUTCOMES = 32, /* number of counters, including spare ones; 256 bytes in all */
};

struct python_line {
	u64 count[PYTHON_OUTCOMES];
};

/* The Python stack in a record: a header, then a word per frame; see model/python_stack.py. */
struct python_head {
	u8 end; /* 0: complete; 1: truncated at the frame limit */
	u8 version;
	u16 frames;
	u32 tag;
};

enum code_records {
	CODE_PIECE,
	CODE_DESCRIPTION,
	PROCESS_SEEN,
};

/* Part of a code object's line table; sent before the object's description. */
struct code_piece {
	u64 id;
	u32 kind;
	u32 bytes;
	u8 data[TABLE_PIECE_BYTES];
};

struct code_description {
	u64 id;
	u32 kind;
	u32 tgid;
	u64 address;
	u64 image;
	u32 first_line;
	u32 first_traceable;
	u32 table_bytes;
	u16 file_bytes;
	u16 name_bytes;
	u8 file_width; /* bytes per character */
	u8 name_width;
	u8 reserved[6];
	u8 text[1024]; /* file, then name */
};

/* Identifies a program by its file and the size of its loaded code. */
struct program_key {
	u64 device;
	u64 inode;
	u64 code_pages;
};

/* A sampled process that is not registered. */
struct process_seen {
	u64 image;
	u32 kind;
	u32 tgid;
	struct program_key program;
};

/* The last report about a process: its program, and the size of its code. */
struct process_told {
	u64 image;
	u64 code_pages;
	u64 time_ns;
	u64 wait_ns; /* minimum time before the same program is reported again */
};

struct code_key {
	u64 image;
	u64 address;
};

/* A code object whose id appears in samples. */
struct code_state {
	u64 check;   /* object's identity, mixed with the id to detect reuse of this map element */
	u64 id;
	u64 pending; /* number of the sample with which the description will be sent; 0: already sent */
};

struct thread_state {
	u64 image;
	u64 address; /* 0: this thread is unknown to Python */
	u64 time_ns;
};

struct new_code {
	u64 address;
	u64 check;
	u64 id;
};

/*
 * State of a walk over Python frames. The verifier does not track loop variables in a map; see
 * unwind_work.
 */
struct python_work {
	struct python_process process; /* a copy */
	u64 image;
	u64 user_ip;
	u64 time_ns;
	u64 sample; /* number of this sample, unique across CPUs */
	u32 tgid;
	u32 tid;
	u32 layout;
	u32 limit;  /* limit on frames */
	u32 native; /* the thread's id in its innermost pid namespace */
	u32 cpu;
	u32 tried; /* threads examined */
	u64 interpreter;
	u64 several; /* the list contains several interpreters, and a thread may have a state in each */
	u64 thread; /* address of the thread state; 0: not found during this interrupt */
	u64 next_thread;
	struct thread_state found;
	u64 frame; /* address of the next frame to visit */
	u64 seen;  /* number of function frames so far */
	u64 open;  /* index + 1 of the last word, if put_entry() may still mark it; else 0 */
	u64 rooted;
	u64 top_at; /* address of a frame being created; otherwise 0 */
	u64 window_at;
	u64 new_codes;
	u64 new_bytes;
	u64 next_id;
	struct code_key key;
	struct code_state state;
	struct python_head head;
	u64 word[MAX_PYTHON_FRAMES + 1];
	struct new_code new_code[MAX_NEW_CODES];
	u64 thread_head[THREAD_BYTES / 8];
	u64 code[CODE_BYTES / 8];
	u8 window[FRAME_WINDOW + FRAME_BYTES];
	struct code_piece piece;
	struct code_description description;
};

ARRAY(python_config, struct python_config, 1);
ARRAY(python_layouts, struct python_layout, MAX_PYTHON_LAYOUTS);
HASH_OF(python_processes, u32, struct python_process, SIZED_BY_LOADER);
LRU_HASH_OF(processes_told, u32, struct process_told, SIZED_BY_LOADER);
LRU_HASH_OF(other_programs, struct program_key, u64, SIZED_BY_LOADER);
LRU_HASH_OF(python_threads, u32, struct thread_state, SIZED_BY_LOADER);
LRU_HASH_OF(codes, struct code_key, struct code_state, SIZED_BY_LOADER);
MMAP_ARRAY(python_lines, struct python_line, SIZED_BY_LOADER);
SCRATCH(python_work, struct python_work);
RING(python_codes);

INLINE struct python_work *get_python_work(void)
{
	u32 zero = 0;

	return LOOKUP(python_work, &zero);
}

INLINE void count_python(const struct python_work *w, u32 outcome)
{
	u32 cpu = w->cpu;
	struct python_line *line = LOOKUP(python_lines, &cpu);

	if (line)
		line->count[outcome & (PYTHON_OUTCOMES - 1)]++;
}

INLINE u64 mix(u64 sum, u64 value)
{
	sum = (sum ^ value) * 0x9e3779b97f4a7c15ULL;
	return sum ^ sum >> 29;
}
