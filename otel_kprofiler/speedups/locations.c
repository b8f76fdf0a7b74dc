/* Adds entries to location_table; otlp/protobuf.py encodes all others. */
#include "speedups.h"
#include <string.h>

#define LINE_BYTES (4 + 2 * VARINT_BYTES) /* two tags, a length and two varints */
#define MAX_BODY_BYTES 127 /* so that the length is one byte */

/* Tags: opentelemetry/proto/profiles/v1development/profiles.proto */
#define LOCATION_TABLE 0x12 /* ProfilesDictionary */
#define MAPPING_INDEX 0x08 /* Location */
#define ADDRESS 0x10
#define LINES 0x1a
#define FUNCTION_INDEX 0x08 /* Line */
#define LINE 0x10

struct text { /* encoded fields that are the same in several locations */
	char *bytes;
	Py_ssize_t size;
};

static uint8_t *write_bytes(uint8_t *to, const struct text *text)
{
	memcpy(to, text->bytes, text->size);
	return to + text->size;
}

/* Reads a field of a tuple as an unsigned integer; returns -1, without an error, if it is none. */
static int read_field(PyObject *tuple, Py_ssize_t at, uint64_t *number)
{
	*number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, at));
	if (*number != UINT64_MAX || !PyErr_Occurred())
		return 0;
	PyErr_Clear();
	return -1;
}

static Py_ssize_t text_size(PyObject *line, Py_ssize_t at)
{
	return PyUnicode_GetLength(PyTuple_GetItem(line, at));
}

/* Writes a line. Returns the position after it: the same position if the line is empty; NULL if its
 * function has no token yet, or on failure. */
static uint8_t *write_line(uint8_t *to, PyObject *line, PyObject *functions)
{
	PyObject *key, *token;
	uint64_t number;
	uint8_t *length = to + 1;
	struct text text;

	if (!PyTuple_Check(line) || PyTuple_Size(line) != 5 || read_field(line, 3, &number))
		return NULL;
	if (!(text_size(line, 0) | text_size(line, 1) | text_size(line, 2)))
		return to;
	key = PyTuple_Pack(4, PyTuple_GetItem(line, 0), PyTuple_GetItem(line, 1),
			   PyTuple_GetItem(line, 2), PyTuple_GetItem(line, 4));
	if (!key)
		return NULL;
	token = PyDict_GetItemWithError(functions, key);
	Py_DECREF(key);
	if (!token || PyBytes_AsStringAndSize(token, &text.bytes, &text.size) ||
	    text.size > VARINT_BYTES)
		return NULL;
	to[0] = LINES;
	to[2] = FUNCTION_INDEX;
	to = write_bytes(to + 3, &text);
	if (number) {
		*to++ = LINE;
		to = write_varint(to, number);
	}
	*length = (uint8_t)(to - length - 1);
	return to;
}

/* Returns the entry of a frame; NULL if it is left to the caller, or on failure. */
static PyObject *encode(PyObject *frame, uint64_t start, uint64_t end, const struct text *mapping,
			const struct text *attributes, PyObject *functions)
{
	uint8_t entry[2 + MAX_BODY_BYTES], *to = entry + 2;
	PyObject *lines;
	uint64_t address;
	Py_ssize_t count;

	if (!PyTuple_Check(frame) || PyTuple_Size(frame) < 3 || read_field(frame, 1, &address) ||
	    address < start || address >= end)
		return NULL;
	lines = PyTuple_GetItem(frame, 2);
	count = PyTuple_Check(lines) ? PyTuple_Size(lines) : MAX_BODY_BYTES;
	if (1 + mapping->size + 1 + VARINT_BYTES + count * LINE_BYTES + attributes->size >
	    MAX_BODY_BYTES)
		return NULL;
	if (mapping->size) {
		*to++ = MAPPING_INDEX;
		to = write_bytes(to, mapping);
	}
	if (address) {
		*to++ = ADDRESS;
		to = write_varint(to, address);
	}
	for (Py_ssize_t at = 0; at < count; at++) {
		to = write_line(to, PyTuple_GetItem(lines, at), functions);
		if (!to)
			return NULL;
	}
	to = write_bytes(to, attributes);
	entry[0] = LOCATION_TABLE;
	entry[1] = (uint8_t)(to - entry - 2);
	return PyBytes_FromStringAndSize((char *)entry, to - entry);
}

/* Returns the token of an entry, after adding the entry and its size if it is new; NULL on failure. */
PyObject *intern(PyObject *entries, PyObject *tokens, PyObject *entry, Py_ssize_t *added)
{
	uint8_t bytes[VARINT_BYTES];
	PyObject *token = PyDict_GetItemWithError(tokens, entry);

	if (token || PyErr_Occurred())
		return Py_XNewRef(token);
	if (PyList_Append(entries, entry))
		return NULL;
	token = PyBytes_FromStringAndSize(
		(char *)bytes, write_varint(bytes, PyList_Size(entries)) - bytes);
	if (token && PyDict_SetItem(tokens, entry, token))
		Py_CLEAR(token);
	*added += PyBytes_Size(entry);
	return token;
}

const char add_locations_text[] = "Adds the locations of frames.";

PyObject *add_locations(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	struct text mapping, attributes;
	PyObject *frames, *functions, *entries, *tokens;
	uint64_t start, end;
	Py_ssize_t at, added = 0;

	if (check_count("add_locations", count, 9) ||
	    PyBytes_AsStringAndSize(arguments[4], &mapping.bytes, &mapping.size) ||
	    PyBytes_AsStringAndSize(arguments[5], &attributes.bytes, &attributes.size) ||
	    check_type("frames", PyList_Check(arguments[0]), "list") ||
	    check_type("functions", PyDict_Check(arguments[6]), "dict") ||
	    check_type("entries", PyList_Check(arguments[7]), "list") ||
	    check_type("tokens", PyDict_Check(arguments[8]), "dict"))
		return NULL;
	frames = arguments[0], functions = arguments[6];
	entries = arguments[7], tokens = arguments[8];
	at = PyLong_AsSsize_t(arguments[1]);
	start = PyLong_AsUnsignedLongLong(arguments[2]);
	end = PyLong_AsUnsignedLongLong(arguments[3]);
	if (PyErr_Occurred())
		return NULL;
	for (; at >= 0 && at < PyList_Size(frames); at++) {
		PyObject *frame = PyList_GetItem(frames, at), *entry, *token;
		int status;

		if (has_token(self, frame))
			continue;
		entry = encode(frame, start, end, &mapping, &attributes, functions);
		if (!entry && !PyErr_Occurred())
			break;
		token = entry ? intern(entries, tokens, entry, &added) : NULL;
		status = token ? store_token(self, frame, token) : -1;
		Py_XDECREF(token);
		Py_XDECREF(entry);
		if (status)
			return NULL;
	}
	return Py_BuildValue("nn", at, added);
}
