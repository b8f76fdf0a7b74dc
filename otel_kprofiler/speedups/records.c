/* Parses the records of on-CPU samples; bpf/layout.py parses all other records. */
#include "speedups.h"
#include <string.h>

#define RECORD_OVERHEAD 8 /* ring buffer header */
#define BUSY (1U << 31)
#define DISCARD (1U << 30)
#define LENGTH (DISCARD - 1)
#define NOT_COLLECTED INT16_MIN
#define NO_OWNER UINT32_MAX
#define USER_VERSION 1
#define USER_MARKER 0xFFFF
#define PYTHON_VERSION 1
#define COMM_BYTES 16

struct record { /* as in programs/sampler.bpf.c */
	uint64_t time_ns, start_time_ns, cgroup_id, trace_high, trace_low, span_id, value, stack_start;
	uint32_t tgid, tid, exec_id, owner;
	uint16_t cpu, number;
	int16_t kernel_bytes, user_bytes, python_bytes;
	uint16_t phase;
	uint32_t labels;
	char comm[COMM_BYTES];
	uint32_t context_bytes, lock_holder;
};

struct user_head { /* as in programs/user_stack.bpf.h */
	uint8_t end, mappings;
	uint16_t frames, version, marker;
};

struct python_head { /* as in programs/python_types.bpf.h */
	uint8_t end, version;
	uint16_t frames;
	uint32_t tag;
};

struct parser {
	PyObject *shared, *kinds, *collect, *sample_type;
	long stack_limit;
	/* The last result of `collect`, and its arguments. */
	PyObject *collected;
	int kernel, user, python;
	/* The last result of a look-up in `kinds`. */
	PyObject *kind;
	uint16_t number;
};

/* Returns a new reference to an equal object that was seen before, or to the object itself. */
static PyObject *share(const struct parser *parser, const char *bytes, Py_ssize_t size)
{
	PyObject *fresh = PyBytes_FromStringAndSize(bytes, size), *earlier;

	if (!fresh)
		return NULL;
	earlier = PyDict_GetItemWithError(parser->shared, fresh);
	if (!earlier) {
		if (PyErr_Occurred() || PyDict_SetItem(parser->shared, fresh, fresh))
			Py_CLEAR(fresh);
		return fresh;
	}
	Py_DECREF(fresh);
	return Py_NewRef(earlier);
}

/* Finds the outcomes of collecting the stacks; returns -1 on failure. */
static int collect(struct parser *parser, int kernel, int user, int python)
{
	PyObject *collected;

	if (parser->collected && kernel == parser->kernel && user == parser->user &&
	    python == parser->python)
		return 0;
	collected = PyObject_CallFunction(parser->collect, "iii", kernel, user, python);
	if (!collected)
		return -1;
	Py_XDECREF(parser->collected);
	parser->collected = collected;
	parser->kernel = kernel;
	parser->user = user;
	parser->python = python;
	return 0;
}

/* Finds a sample kind. Returns 0 if it is unknown, -1 on failure. */
static int find_kind(struct parser *parser, uint16_t number)
{
	PyObject *key, *kind;

	if (parser->kind && parser->number == number)
		return 1;
	key = PyLong_FromLong(number);
	if (!key)
		return -1;
	kind = PyDict_GetItemWithError(parser->kinds, key);
	Py_DECREF(key);
	if (!kind)
		return PyErr_Occurred() ? -1 : 0;
	Py_XDECREF(parser->kind);
	parser->kind = Py_NewRef(kind);
	parser->number = number;
	return 1;
}

static Py_ssize_t positive(int16_t size)
{
	return size > 0 ? size : 0;
}

/* Returns whether the stacks fill the record after its header exactly, and are well-formed. */
static int check_stacks(const struct record *record, const char *stacks, Py_ssize_t size)
{
	Py_ssize_t kernel = positive(record->kernel_bytes), user = positive(record->user_bytes);
	Py_ssize_t python = positive(record->python_bytes);
	struct user_head user_head;
	struct python_head python_head;

	if (kernel + user + python != size)
		return 0;
	if (user) {
		if (user < (Py_ssize_t)sizeof(user_head))
			return 0;
		memcpy(&user_head, stacks + kernel, sizeof(user_head));
		if (user_head.version != USER_VERSION || user_head.marker != USER_MARKER ||
		    user != (Py_ssize_t)sizeof(user_head) + user_head.mappings * MAPPING_BYTES +
				    user_head.frames * WORD_BYTES)
			return 0;
	}
	if (python) {
		if (python < (Py_ssize_t)sizeof(python_head))
			return 0;
		memcpy(&python_head, stacks + kernel + user, sizeof(python_head));
		if (python_head.version != PYTHON_VERSION ||
		    python != (Py_ssize_t)sizeof(python_head) + python_head.frames * WORD_BYTES)
			return 0;
	}
	return 1;
}

/* Returns the stacks that were collected, even if they are empty. */
static PyObject *share_stacks(struct parser *parser, const struct record *record,
			      const char *stacks)
{
	const int16_t sizes[] = {record->kernel_bytes, record->user_bytes, record->python_bytes};
	PyObject *tuple, *parts[3];
	Py_ssize_t count = 0;

	for (int at = 0; at < 3; at++) {
		if (at == 2 ? sizes[at] <= 0 : sizes[at] == NOT_COLLECTED)
			continue;
		parts[count] = share(parser, stacks, positive(sizes[at]));
		stacks += positive(sizes[at]);
		if (!parts[count++])
			goto fail;
	}
	tuple = PyTuple_New(count);
	if (!tuple)
		goto fail;
	for (Py_ssize_t at = 0; at < count; at++)
		PyTuple_SetItem(tuple, at, parts[at]);
	return tuple;
fail:
	while (count--)
		Py_XDECREF(parts[count]);
	return NULL;
}

static Py_ssize_t name_bytes(const char *comm)
{
	Py_ssize_t size = 0;

	while (size < COMM_BYTES - 1 && comm[size])
		size++;
	return size;
}

/* Returns a RawSample; NULL on failure. The fields are in the order of RawSample. */
static PyObject *make_sample(struct parser *parser, const struct record *record, PyObject *stacks)
{
	PyObject *fields;
	PyObject *start = record->start_time_ns ? PyLong_FromUnsignedLongLong(record->start_time_ns) :
						  Py_NewRef(Py_None);
	PyObject *owner = record->owner != NO_OWNER ? PyLong_FromUnsignedLong(record->owner) :
						      Py_NewRef(Py_None);

	/* N: Py_BuildValue takes over the reference, even on failure. */
	fields = Py_BuildValue("OKKHIINKy#ONOIOINKy", parser->kind, record->value, record->time_ns,
			       record->cpu, record->tgid, record->tid, start, record->cgroup_id,
			       record->comm, name_bytes(record->comm), parser->collected, stacks,
			       Py_None, record->labels, Py_None, record->exec_id, owner,
			       record->stack_start, "");
	return fields ? new_record(parser->sample_type, fields) : NULL;
}

/* Parses a record and stores its sample. Returns 0 if the record is left to the caller, -1 on
 * failure. */
static int parse(struct parser *parser, const char *bytes, Py_ssize_t size, PyObject **sample)
{
	struct record record;
	const char *stacks;
	PyObject *shared;
	int kernel, user, python, status;

	if (size < (Py_ssize_t)sizeof(record))
		return 0;
	memcpy(&record, bytes, sizeof(record));
	stacks = bytes + sizeof(record);
	if (record.phase || record.span_id || record.context_bytes ||
	    !check_stacks(&record, stacks, size - (Py_ssize_t)sizeof(record)))
		return 0;
	status = find_kind(parser, record.number);
	if (status <= 0)
		return status;
	kernel = record.kernel_bytes > 0 ? record.kernel_bytes >= parser->stack_limit :
					   record.kernel_bytes;
	user = record.user_bytes > 0 ? (uint8_t)stacks[positive(record.kernel_bytes)] :
				       record.user_bytes;
	python = record.python_bytes > 0 ? (uint8_t)bytes[size - record.python_bytes] : -1;
	if (collect(parser, kernel, user, python))
		return -1;
	shared = share_stacks(parser, &record, stacks);
	*sample = shared ? make_sample(parser, &record, shared) : NULL;
	return *sample ? 1 : -1;
}

const char parse_samples_text[] = "Parses consecutive on-CPU samples in a chunk of the ring.";

PyObject *parse_samples(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct parser parser = {0};
	PyObject *samples;
	Py_ssize_t at, end;
	char *bytes;
	int status = 0;

	(void)module;
	if (check_count("parse_samples", count, 8) ||
	    PyBytes_AsStringAndSize(arguments[0], &bytes, &end) ||
	    check_type("samples", PyList_Check(arguments[2]), "list") ||
	    check_type("shared", PyDict_Check(arguments[3]), "dict") ||
	    check_type("kinds", PyDict_Check(arguments[4]), "dict"))
		return NULL;
	at = PyLong_AsSsize_t(arguments[1]);
	if (at == -1 && PyErr_Occurred())
		return NULL;
	samples = arguments[2];
	parser.shared = arguments[3];
	parser.kinds = arguments[4];
	parser.collect = arguments[5];
	parser.stack_limit = PyLong_AsLong(arguments[6]);
	if (parser.stack_limit == -1 && PyErr_Occurred())
		return NULL;
	parser.sample_type = arguments[7];
	if (at < 0) {
		PyErr_SetString(PyExc_ValueError, "the offset is negative");
		return NULL;
	}
	while (at < end && end - at >= RECORD_OVERHEAD) {
		PyObject *sample;
		uint32_t length;
		Py_ssize_t following;

		memcpy(&length, bytes + at, sizeof(length));
		following = at + RECORD_OVERHEAD + (((Py_ssize_t)(length & LENGTH) + 7) & ~7);
		if (length & BUSY || following > end)
			break;
		if (!(length & DISCARD)) {
			status = parse(&parser, bytes + at + RECORD_OVERHEAD, length & LENGTH,
				       &sample);
			if (status <= 0)
				break;
			status = PyList_Append(samples, sample);
			Py_DECREF(sample);
			if (status)
				break;
		}
		at = following;
	}
	Py_XDECREF(parser.collected);
	Py_XDECREF(parser.kind);
	return status < 0 ? NULL : PyLong_FromSsize_t(at);
}
