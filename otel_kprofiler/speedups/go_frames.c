/* Generates the unwind entries of Go functions on x86-64; unwinding/go_frames.py does so for others. */
#include "speedups.h"
#include <string.h>

#define LONG 0x80 /* set in all bytes of a varint except the last */
#define MAX_VARINT 5
#define FIRST 2 /* the first change in the frame size, from -1 to 0 */
#define PUSH 0x55 /* push %rbp */
#define MAX_SEGMENTS 16
#define MAX_APART 8
#define NUMBERS 7

enum { ADVANCE_1 = 0x40, ADVANCE_2 = 3, ADVANCE_4 = 4, CFA_OFFSET = 0x0E, RBP_KEPT = 0xC6 };

struct function { /* the first bytes of _func in Go's runtime/runtime2.go */
	uint32_t start;
	int32_t name;
	uint32_t arguments, defer_return, sizes, pc_file, pc_line, data_count, unit;
	int32_t start_line;
	uint8_t id, flags;
} __attribute__((packed));

struct entry { /* of .eh_frame, without its program */
	uint32_t length, back;
	int32_t start;
	uint32_t size;
	uint8_t augmentation;
} __attribute__((packed));

struct pair {
	uint64_t start, entry;
};

struct bytes {
	const uint8_t *at;
	uint64_t size;
};

struct segment {
	uint64_t offset, size, address;
};

struct program {
	int64_t size; /* of the function */
	uint64_t first; /* distance to the first change */
	Py_ssize_t bytes;
	uint8_t code[4096];
};

/* Reads a varint, and advances. Returns -1 if it is truncated, padded or has more than 32 bits. */
static int64_t number(const uint8_t **at, const uint8_t *end)
{
	uint64_t value = 0;

	for (int shift = 0; shift < 7 * MAX_VARINT && *at < end; shift += 7) {
		uint8_t byte = *(*at)++;

		value |= (uint64_t)(byte & (LONG - 1)) << shift;
		if (byte < LONG)
			return value >> 32 || (shift && !byte) ? -1 : (int64_t)value;
	}
	return -1;
}

static void put(struct program *program, uint8_t byte)
{
	program->code[program->bytes++] = byte;
}

static void put_little_endian(struct program *program, uint32_t value, int bytes)
{
	for (; bytes; bytes--, value >>= 8)
		put(program, (uint8_t)value);
}

static void advance(struct program *program, uint32_t distance)
{
	if (distance >> 16) {
		put(program, ADVANCE_4);
		put_little_endian(program, distance, 4);
	} else if (distance > 63) {
		put(program, ADVANCE_2);
		put_little_endian(program, distance, 2);
	} else if (distance) {
		put(program, (uint8_t)(ADVANCE_1 | distance));
	}
}

static void change_frame(struct program *program, int64_t size, int64_t after)
{
	put(program, CFA_OFFSET);
	program->bytes = write_varint(program->code + program->bytes, (uint64_t)after + 8) -
			 program->code;
	if (!size) { /* offset rbp 2 */
		put(program, 0x86);
		put(program, 2);
	} else if (!after) {
		put(program, RBP_KEPT);
	}
}

/* Generates a function's program from its frame sizes, as go_steps.py does. Returns 0 if the sizes
 * are unusual. */
static int make_program(struct program *program, struct bytes table, uint64_t at)
{
	const uint8_t *next = table.at + at, *end = table.at + table.size;
	int64_t size = 0;

	program->size = 0;
	program->bytes = 0;
	if (at >= table.size || *next++ != FIRST)
		return 0;
	for (int64_t step = 0;; step++) {
		int64_t distance = number(&next, end), change, after;

		if (distance <= 0)
			return 0;
		change = number(&next, end);
		if (change < 0 || program->bytes > (Py_ssize_t)sizeof(program->code) - 32)
			return 0;
		if (!step)
			program->first = (uint64_t)distance;
		program->size += distance;
		if (!change)
			break;
		after = size + (change >> 1 ^ -(change & 1));
		if (after < 0 || program->size > UINT32_MAX)
			return 0;
		advance(program, (uint32_t)distance);
		change_frame(program, size, after);
		size = after;
	}
	while ((sizeof(struct entry) + (size_t)program->bytes) & 3)
		put(program, 0);
	return program->size <= UINT32_MAX;
}

/* Finds the offset of an address in the file; -1 if no segment contains the address. */
static int64_t locate(const struct segment *segments, Py_ssize_t count, uint64_t address)
{
	for (Py_ssize_t i = 0; i < count; i++)
		if (address - segments[i].address < segments[i].size)
			return (int64_t)(address - segments[i].address + segments[i].offset);
	return -1;
}

static int contains(const int64_t *numbers, Py_ssize_t count, int64_t value)
{
	for (Py_ssize_t i = 0; i < count; i++)
		if (numbers[i] == value)
			return 1;
	return 0;
}

struct job {
	struct bytes table, file, trampoline;
	uint64_t rows_at, count, sizes_at, text, address, most_bytes;
	uint8_t special_flags;
	Py_ssize_t segment_count, apart_count;
	struct segment segments[MAX_SEGMENTS];
	int64_t apart[MAX_APART];
	PyObject *frames, *pairs;
};

static int append(PyObject *bytes, const void *content, Py_ssize_t size)
{
	Py_ssize_t at = PyByteArray_Size(bytes);

	if (PyByteArray_Resize(bytes, at + size))
		return -1;
	memcpy(PyByteArray_AsString(bytes) + at, content, (size_t)size);
	return 0;
}

static int append_entry(const struct job *job, uint64_t start, const struct program *program)
{
	uint64_t at = (uint64_t)PyByteArray_Size(job->frames), address = job->address + at;
	int64_t distance = (int64_t)(start - (address + 8));
	struct entry entry = {
		.length = (uint32_t)(sizeof(entry) - 4 + (size_t)program->bytes),
		.back = (uint32_t)(at + 4),
		.start = (int32_t)distance,
		.size = (uint32_t)program->size,
	};
	struct pair pair = {start, address};

	if (distance != entry.start || at > INT32_MAX)
		return 1;
	if (append(job->frames, &entry, sizeof(entry)) ||
	    append(job->frames, program->code, program->bytes))
		return -1;
	return append(job->pairs, &pair, sizeof(pair));
}

/* Adds the entry of a function. Returns 1 if the caller has to handle the function, -1 on failure. */
static int add(const struct job *job, uint64_t index, struct program *program)
{
	struct function function;
	uint32_t row;
	int64_t at;
	uint64_t start;

	memcpy(&row, job->table.at + job->rows_at + 8 * index + 4, sizeof(row));
	if (job->rows_at + row + sizeof(function) > job->table.size)
		return 1;
	memcpy(&function, job->table.at + job->rows_at + row, sizeof(function));
	if (!function.sizes)
		return 0;
	if (function.flags & job->special_flags ||
	    contains(job->apart, job->apart_count, function.name) ||
	    !make_program(program, job->table, job->sizes_at + function.sizes))
		return 1;
	start = job->text + function.start;
	if (program->bytes > 3) { /* more than padding */
		at = locate(job->segments, job->segment_count, start + program->first - 1);
		if (at < 0 || (uint64_t)at >= job->file.size || job->file.at[at] != PUSH)
			return 1;
	} else {
		at = locate(job->segments, job->segment_count, start);
		if (at >= 0 && (uint64_t)at < job->file.size &&
		    job->trampoline.size <= job->file.size - (uint64_t)at &&
		    !memcmp(job->file.at + at, job->trampoline.at, job->trampoline.size))
			return 0;
	}
	return append_entry(job, start, program);
}

static int64_t add_from(const struct job *job, uint64_t index)
{
	struct program program;

	for (; index < job->count; index++) {
		Py_ssize_t at = PyByteArray_Size(job->frames);
		int status = add(job, index, &program);

		if (status < 0)
			return -1;
		if (status)
			break;
		if ((uint64_t)at > job->most_bytes && PyByteArray_Size(job->frames) > at)
			return (int64_t)job->count;
	}
	return (int64_t)index;
}

static int parse_numbers(PyObject *tuple, uint64_t *numbers, Py_ssize_t count)
{
	if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
		PyErr_SetString(PyExc_TypeError, "expected a tuple of the right size");
		return -1;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		numbers[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(tuple, i));
		if (numbers[i] == UINT64_MAX && PyErr_Occurred())
			return -1;
	}
	return 0;
}

static int parse_job(struct job *job, PyObject *const *arguments)
{
	PyObject *segments = arguments[5], *apart = arguments[6];
	uint64_t numbers[NUMBERS];

	if (parse_numbers(arguments[3], numbers, NUMBERS))
		return -1;
	job->rows_at = numbers[0];
	job->count = numbers[1];
	job->sizes_at = numbers[2];
	job->text = numbers[3];
	job->address = numbers[4];
	job->most_bytes = numbers[5];
	job->special_flags = (uint8_t)numbers[6];
	if (!PyTuple_Check(segments) || PyTuple_Size(segments) > MAX_SEGMENTS || !PyTuple_Check(apart) ||
	    PyTuple_Size(apart) > MAX_APART) {
		PyErr_SetString(PyExc_TypeError, "expected short tuples");
		return -1;
	}
	job->segment_count = PyTuple_Size(segments);
	for (Py_ssize_t i = 0; i < job->segment_count; i++)
		if (parse_numbers(PyTuple_GetItem(segments, i), &job->segments[i].offset, 3))
			return -1;
	job->apart_count = PyTuple_Size(apart);
	if (parse_numbers(apart, (uint64_t *)job->apart, job->apart_count))
		return -1;
	job->frames = arguments[7];
	job->pairs = arguments[8];
	if (!PyByteArray_Check(job->frames) || !PyByteArray_Check(job->pairs)) {
		PyErr_SetString(PyExc_TypeError, "expected bytearrays");
		return -1;
	}
	if (job->rows_at > job->table.size || job->count > (job->table.size - job->rows_at) / 8) {
		PyErr_SetString(PyExc_ValueError, "the table of functions is truncated");
		return -1;
	}
	return 0;
}

const char add_go_functions_text[] = "Adds the unwind entries of Go functions.";

PyObject *add_go_functions(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	Py_buffer views[3] = {{0}};
	struct job job;
	int64_t next = -1;
	int taken = 0;
	uint64_t index;

	(void)module;
	if (check_count("add_go_functions", count, 9))
		return NULL;
	index = PyLong_AsUnsignedLongLong(arguments[4]);
	if (index == UINT64_MAX && PyErr_Occurred())
		return NULL;
	while (taken < 3 && !PyObject_GetBuffer(arguments[taken], &views[taken], PyBUF_SIMPLE))
		taken++;
	if (taken == 3) {
		job.table = (struct bytes){views[0].buf, (uint64_t)views[0].len};
		job.file = (struct bytes){views[1].buf, (uint64_t)views[1].len};
		job.trampoline = (struct bytes){views[2].buf, (uint64_t)views[2].len};
		if (!parse_job(&job, arguments))
			next = add_from(&job, index);
	}
	while (taken)
		PyBuffer_Release(&views[--taken]);
	return next < 0 ? NULL : PyLong_FromLongLong(next);
}

const char pack_pairs_text[] = "Packs a search table; returns None if it needs to be sorted.";

PyObject *pack_pairs(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	Py_buffer view;
	PyObject *packed = NULL;
	uint64_t origin;
	int64_t last = INT64_MIN;
	Py_ssize_t pairs;

	(void)module;
	if (check_count("pack_pairs", count, 2))
		return NULL;
	origin = PyLong_AsUnsignedLongLong(arguments[1]);
	if ((origin == UINT64_MAX && PyErr_Occurred()) ||
	    PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE))
		return NULL;
	pairs = view.len / (Py_ssize_t)sizeof(struct pair);
	packed = PyBytes_FromStringAndSize(NULL, pairs * 8);
	for (Py_ssize_t i = 0; packed && i < pairs; i++) {
		struct pair pair;
		int64_t start, entry;
		int32_t row[2];

		memcpy(&pair, (const char *)view.buf + i * (Py_ssize_t)sizeof(pair), sizeof(pair));
		start = (int64_t)(pair.start - origin);
		entry = (int64_t)(pair.entry - origin);
		row[0] = (int32_t)start;
		row[1] = (int32_t)entry;
		if (start < last || row[0] != start || row[1] != entry) {
			Py_DECREF(packed);
			packed = Py_NewRef(Py_None);
			break;
		}
		memcpy(PyBytes_AsString(packed) + i * 8, row, sizeof(row));
		last = start;
	}
	PyBuffer_Release(&view);
	return packed;
}
