/* Encodes samples and adds their stacks to stack_table; otlp/encode.py encodes all others. */
#include "speedups.h"
#include <string.h>

#define FIELDS 9 /* of a WindowSample; model/window.py describes them */
#define LINK 4
#define TIMES 5
#define MAX_SAMPLES 64 /* of a call, so that other threads can run in between */
#define SAMPLE_BYTES 4 /* two tags and two lengths */
#define TIME_BYTES 8

/* Tags: opentelemetry/proto/profiles/v1development/profiles.proto */
#define STACK_TABLE 0x3a /* ProfilesDictionary */
#define LOCATION_INDICES 0x0a /* Stack */
#define SAMPLES 0x12 /* Profile */
#define STACK_INDEX 0x08 /* Sample */
#define TIMESTAMPS 0x2a

struct request {
	PyObject *frame_tokens, *stacks, *statuses, *shortcuts, *entries, *tokens, *times;
	PyObject *no_statuses, *no_root;
	Py_ssize_t size, added, count;
};

static uint8_t *write_header(uint8_t *to, uint8_t tag, Py_ssize_t size)
{
	*to++ = tag;
	return write_varint(to, size);
}

/* Returns the table entry of a stack; NULL if the stack is left to the caller, or on failure. */
static PyObject *encode_stack(PyObject *frame_tokens, PyObject *stack)
{
	uint8_t inner[1 + VARINT_BYTES], outer[1 + VARINT_BYTES], *end;
	PyObject *sides = PyObject_GetAttrString(stack, "sides"), *locations = NULL, *entry = NULL;
	Py_ssize_t inner_bytes, outer_bytes, size;

	if (sides && PyTuple_Check(sides))
		locations = join_sides(frame_tokens, sides, "", 0, NULL);
	Py_XDECREF(sides);
	size = locations && locations != Py_None ? PyBytes_Size(locations) : 0;
	if (size) {
		inner_bytes = write_header(inner, LOCATION_INDICES, size) - inner;
		outer_bytes = write_header(outer, STACK_TABLE, inner_bytes + size) - outer;
		entry = PyBytes_FromStringAndSize(NULL, outer_bytes + inner_bytes + size);
	}
	if (entry) {
		end = (uint8_t *)PyBytes_AsString(entry);
		memcpy(end, outer, outer_bytes);
		memcpy(end + outer_bytes, inner, inner_bytes);
		memcpy(end + outer_bytes + inner_bytes, PyBytes_AsString(locations), size);
	}
	Py_XDECREF(locations);
	return entry;
}

/* Returns the token of a stack; NULL if the stack is left to the caller, or on failure. */
static PyObject *find_stack(struct request *request, PyObject *stack)
{
	PyObject *token = PyDict_GetItemWithError(request->stacks, stack), *entry;

	if (token || PyErr_Occurred())
		return Py_XNewRef(token);
	entry = encode_stack(request->frame_tokens, stack);
	if (!entry)
		return NULL;
	token = intern(request->entries, request->tokens, entry, &request->added);
	Py_DECREF(entry);
	if (token && PyDict_SetItem(request->stacks, stack, token))
		Py_CLEAR(token);
	return token;
}

/* Returns what identifies a sample; NULL if the sample is left to the caller, or on failure. */
static PyObject *encode_head(struct request *request, PyObject *sample)
{
	PyObject *fields[FIELDS], *token, *key, *attributes, *head = NULL;
	Py_ssize_t token_bytes, attribute_bytes;
	char *token_text, *text, *to;

	for (int at = 0; at < FIELDS; at++)
		fields[at] = PyTuple_GetItem(sample, at);
	if (PyDict_Size(request->statuses) && PyDict_Contains(request->statuses, fields[0]))
		return NULL;
	token = find_stack(request, fields[0]);
	if (!token)
		return NULL;
	key = PyTuple_Pack(7, fields[1], fields[2], fields[3], request->no_statuses,
			   request->no_root, fields[7], fields[8]);
	attributes = key ? PyDict_GetItemWithError(request->shortcuts, key) : NULL;
	Py_XDECREF(key);
	if (attributes && !PyBytes_AsStringAndSize(token, &token_text, &token_bytes) &&
	    !PyBytes_AsStringAndSize(attributes, &text, &attribute_bytes))
		head = PyBytes_FromStringAndSize(NULL, !!token_bytes + token_bytes + attribute_bytes);
	if (head) {
		to = PyBytes_AsString(head);
		if (token_bytes)
			*to++ = STACK_INDEX;
		memcpy(to, token_text, token_bytes);
		memcpy(to + token_bytes, text, attribute_bytes);
	}
	Py_DECREF(token);
	return head;
}

/* Returns packed timestamps; NULL if they are left to the caller, or on failure. */
static PyObject *pack_times(PyObject *list)
{
	Py_ssize_t size = PyList_Check(list) ? PyList_Size(list) : 0;
	PyObject *packed = size ? PyBytes_FromStringAndSize(NULL, size * TIME_BYTES) : NULL;

	for (Py_ssize_t at = 0; packed && at < size; at++) {
		PyObject *item = PyList_GetItem(list, at);
		uint64_t time = PyLong_Check(item) ? PyLong_AsUnsignedLongLong(item) : UINT64_MAX;

		if (time == UINT64_MAX) {
			PyErr_Clear();
			Py_CLEAR(packed);
		} else {
			memcpy(PyBytes_AsString(packed) + at * TIME_BYTES, &time, TIME_BYTES);
		}
	}
	return packed;
}

/* Adds a sample. Returns -1, without an error unless one occurred, if it is left to the caller. */
static int add_sample(struct request *request, PyObject *sample)
{
	PyObject *times = NULL, *head = NULL, *earlier;
	Py_ssize_t size;
	int status = -1;

	if (!PyTuple_Check(sample) || PyTuple_Size(sample) != FIELDS ||
	    PyTuple_GetItem(sample, LINK) != Py_None)
		return -1;
	times = pack_times(PyTuple_GetItem(sample, TIMES));
	head = times ? encode_head(request, sample) : NULL;
	if (!head)
		goto out;
	size = PyBytes_Size(times);
	request->size += size;
	request->count += size / TIME_BYTES;
	earlier = PyDict_GetItemWithError(request->times, head);
	if (earlier) {
		Py_INCREF(earlier);
		PyBytes_ConcatAndDel(&earlier, times);
		times = earlier;
	} else {
		request->size += PyBytes_Size(head) + SAMPLE_BYTES;
	}
	if (times && !PyErr_Occurred())
		status = PyDict_SetItem(request->times, head, times);
out:
	Py_XDECREF(head);
	Py_XDECREF(times);
	return status;
}

const char add_samples_text[] = "Adds samples without links and values, and their stacks.";

PyObject *add_samples(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	struct request request = {.frame_tokens = self};
	PyObject *samples, *sizes, *result = NULL;
	Py_ssize_t at, limit, tables_size, left = MAX_SAMPLES;

	if (check_count("add_samples", count, 12) ||
	    check_type("samples", PyList_Check(arguments[0]), "list") ||
	    check_type("entries", PyList_Check(arguments[5]), "list") ||
	    check_type("sizes", PyList_Check(arguments[8]), "list"))
		return NULL;
	for (int dict = 2; dict < 8; dict++) {
		if (dict != 5 && check_type("table", PyDict_Check(arguments[dict]), "dict"))
			return NULL;
	}
	samples = arguments[0], request.stacks = arguments[2], request.statuses = arguments[3];
	request.shortcuts = arguments[4], request.entries = arguments[5];
	request.tokens = arguments[6], request.times = arguments[7], sizes = arguments[8];
	at = PyLong_AsSsize_t(arguments[1]);
	request.size = PyLong_AsSsize_t(arguments[9]);
	tables_size = PyLong_AsSsize_t(arguments[10]);
	limit = PyLong_AsSsize_t(arguments[11]);
	if (PyErr_Occurred())
		return NULL;
	request.no_statuses = PyTuple_New(0);
	request.no_root = PyUnicode_FromString("");
	if (!request.no_statuses || !request.no_root)
		goto out;
	for (; left && at >= 0 && at < PyList_Size(samples); at++, left--) {
		PyObject *size;
		int status;

		if (add_sample(&request, PyList_GetItem(samples, at)))
			break;
		size = PyLong_FromSsize_t(request.size + tables_size + request.added);
		status = size ? PyList_Append(sizes, size) : -1;
		Py_XDECREF(size);
		if (status)
			break;
		if (request.size + tables_size + request.added > limit)
			left = 1;
	}
	if (!PyErr_Occurred())
		result = Py_BuildValue("nnnn", at, request.size, request.added, request.count);
out:
	Py_XDECREF(request.no_statuses);
	Py_XDECREF(request.no_root);
	return result;
}

const char encode_samples_text[] = "Encodes samples without values.";

PyObject *encode_samples(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	PyObject *head, *times, *encoded;
	Py_ssize_t at = 0, size = 0;
	uint8_t *bytes, *to;

	(void)module;
	if (check_count("encode_samples", count, 1) ||
	    check_type("times", PyDict_Check(arguments[0]), "dict"))
		return NULL;
	while (PyDict_Next(arguments[0], &at, &head, &times)) {
		if (check_type("head", PyBytes_Check(head), "bytes object") ||
		    check_type("times", PyBytes_Check(times), "bytes object"))
			return NULL;
		size += 2 * (1 + VARINT_BYTES) + PyBytes_Size(head) + PyBytes_Size(times);
	}
	bytes = to = PyMem_Malloc(size + 1);
	if (!bytes)
		return PyErr_NoMemory();
	for (at = 0; PyDict_Next(arguments[0], &at, &head, &times);) {
		uint8_t inner[1 + VARINT_BYTES];
		Py_ssize_t head_bytes = PyBytes_Size(head), time_bytes = PyBytes_Size(times);
		Py_ssize_t inner_bytes = time_bytes ?
			write_header(inner, TIMESTAMPS, time_bytes) - inner : 0;

		to = write_header(to, SAMPLES, head_bytes + inner_bytes + time_bytes);
		memcpy(to, PyBytes_AsString(head), head_bytes);
		memcpy(to + head_bytes, inner, inner_bytes);
		memcpy(to + head_bytes + inner_bytes, PyBytes_AsString(times), time_bytes);
		to += head_bytes + inner_bytes + time_bytes;
	}
	encoded = PyBytes_FromStringAndSize((char *)bytes, to - bytes);
	PyMem_Free(bytes);
	return encoded;
}
