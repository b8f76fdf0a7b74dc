/* Replaces the inner loops of the profiler that run for each frame, record, function or type. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

/* A METH_FASTCALL function, as the type that PyMethodDef requires. */
#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

/* Sizes of the parts of a user stack, as in programs/user_stack.bpf.h. */
#define USER_HEAD_BYTES 8
#define MAPPING_BYTES 24
#define WORD_BYTES 8

/* Fields of a RawSample. */
enum {
	SAMPLE_VALUE = 1,
	SAMPLE_TIME = 2,
	SAMPLE_CPU = 3,
	SAMPLE_TID = 5,
	SAMPLE_COMM = 8,
	SAMPLE_COLLECTED = 9,
	SAMPLE_STACKS = 10,
	SAMPLE_LINK = 11,
	SAMPLE_LABELS = 12,
	SAMPLE_WAIT = 13,
	SAMPLE_CONTEXT = 17,
	SAMPLE_FIELDS = 18,
};

extern PyType_Spec frame_cache_spec, frame_tokens_spec;

#define DECLARE(name) \
	extern const char name##_text[]; \
	PyObject *name(PyObject *module, PyObject *const *arguments, Py_ssize_t count)

DECLARE(add_go_functions);
DECLARE(add_locations);
DECLARE(add_samples);
DECLARE(encode_samples);
DECLARE(find_btf_types);
DECLARE(find_line);
DECLARE(find_stacks);
DECLARE(group_samples);
DECLARE(interleave);
DECLARE(pack_pairs);
DECLARE(parse_samples);

int check_count(const char *name, Py_ssize_t count, Py_ssize_t expected);
int check_items(const char *name, PyObject *tuple, Py_ssize_t size);
int check_type(const char *name, int has_type, const char *type);
void free_object(PyObject *self);
PyObject *find_user_frames(PyObject *stack, PyObject *tables);
PyObject *new_record(PyObject *type, PyObject *fields);
PyObject *intern(PyObject *entries, PyObject *tokens, PyObject *entry, Py_ssize_t *added);
PyObject *join_sides(PyObject *self, PyObject *sides, const char *separator,
		     Py_ssize_t separator_bytes, PyObject *missing);
int has_token(PyObject *self, PyObject *frame);
int store_token(PyObject *self, PyObject *frame, PyObject *token);

/* Hashes a key so that its low bits depend on all bits. The multiplier is 2^64 / phi (Knuth). */
static inline uint64_t hash(uint64_t key)
{
	key ^= key >> 32;
	key *= 0x9E3779B97F4A7C15;
	return key ^ key >> 32;
}

#define VARINT_BYTES 10

/* Writes a varint (ULEB128) of up to 10 bytes, and returns the position after it. */
static inline uint8_t *write_varint(uint8_t *to, uint64_t value)
{
	while (value > 127) {
		*to++ = (uint8_t)(value | 128);
		value >>= 7;
	}
	*to++ = (uint8_t)value;
	return to;
}
