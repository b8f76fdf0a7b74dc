/* Finds source lines in the location tables of CPython code objects (CPython's Objects/locations.md
 * in 3.11 and 3.12, InternalDocs/code_objects.md from 3.13 on). */
#include "speedups.h"
#include <limits.h>

#define FIRST_BYTE 0x80 /* only the first byte of an entry has this bit */
#define FIRST_ONE_LINE 10
#define LAST_ONE_LINE 12
#define LAST_NUMBER 14
#define NUMBER_BYTES 6
#define CONTINUED 0x40

/* Reads a signed varint: six bits per byte, lowest first; bit 0 is the sign. Returns the position
 * after it, or NULL if it is malformed. */
static const uint8_t *read_number(const uint8_t *at, const uint8_t *end, int64_t *number)
{
	uint64_t value = 0;

	for (int place = 0; place < NUMBER_BYTES && at < end && !(*at & FIRST_BYTE); place++) {
		value |= (uint64_t)(*at & (CONTINUED - 1)) << 6 * place;
		if (!(*at++ & CONTINUED)) {
			*number = value & 1 ? -(int64_t)(value >> 1) : (int64_t)(value >> 1);
			return at;
		}
	}
	return NULL;
}

static long find(const uint8_t *at, const uint8_t *end, int64_t line, int64_t instruction)
{
	while (at < end && *at & FIRST_BYTE) {
		int kind = *at >> 3 & 15, units = (*at & 7) + 1;
		int64_t lines = kind >= FIRST_ONE_LINE && kind <= LAST_ONE_LINE ? kind - FIRST_ONE_LINE : 0;

		at++;
		if (kind > LAST_ONE_LINE && kind <= LAST_NUMBER) {
			at = read_number(at, end, &lines);
			if (!at)
				return 0;
		}
		line += lines;
		if (instruction < units)
			return kind <= LAST_NUMBER && line > 0 && line <= INT_MAX ? (long)line : 0;
		instruction -= units;
		while (at < end && !(*at & FIRST_BYTE))
			at++;
	}
	return 0;
}

const char find_line_text[] = "Returns the source line of an instruction, or 0.";

PyObject *find_line(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	char *table;
	Py_ssize_t size;
	long long first_line, instruction;

	(void)module;
	if (check_count("find_line", count, 3) ||
	    PyBytes_AsStringAndSize(arguments[0], &table, &size))
		return NULL;
	first_line = PyLong_AsLongLong(arguments[1]);
	instruction = PyLong_AsLongLong(arguments[2]);
	if (PyErr_Occurred())
		return NULL;
	if (first_line < INT_MIN || first_line > INT_MAX || instruction < 0)
		return PyLong_FromLong(0);
	return PyLong_FromLong(find((const uint8_t *)table, (const uint8_t *)table + size, first_line,
				    instruction));
}
