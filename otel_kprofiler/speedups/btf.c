/* Finds the types in BTF, the type information of the kernel (Documentation/bpf/btf.rst). */
#include "speedups.h"
#include <string.h>

#define KINDS 32
#define TYPE_WORDS 3

/* Stores the offset of each type in `places`, unless that is NULL, and returns their number. */
static Py_ssize_t find_types(const Py_buffer *types, const uint8_t *fixed, const uint8_t *each,
			     uint32_t *places)
{
	uint64_t words = (uint64_t)types->len / 4, at = 0;
	Py_ssize_t count = 0;

	for (; at + 2 < words; count++) {
		uint32_t info;

		memcpy(&info, (const char *)types->buf + 4 * (at + 1), sizeof(info));
		if (places)
			places[count] = (uint32_t)(4 * at);
		at += fixed[info >> 24 & (KINDS - 1)] +
		      (uint64_t)each[info >> 24 & (KINDS - 1)] * (info & 0xFFFF);
	}
	return count;
}

const char find_btf_types_text[] = "Returns the offset of each type in BTF's type section.";

PyObject *find_btf_types(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	Py_buffer types;
	PyObject *places = NULL;
	char *fixed, *each;
	Py_ssize_t fixed_bytes, each_bytes;

	(void)module;
	if (check_count("find_btf_types", count, 3) ||
	    PyBytes_AsStringAndSize(arguments[1], &fixed, &fixed_bytes) ||
	    PyBytes_AsStringAndSize(arguments[2], &each, &each_bytes))
		return NULL;
	if (fixed_bytes != KINDS || each_bytes != KINDS || memchr(fixed, 0, KINDS)) {
		PyErr_SetString(PyExc_ValueError, "expected the size of each kind of type");
		return NULL;
	}
	if (PyObject_GetBuffer(arguments[0], &types, PyBUF_SIMPLE))
		return NULL;
	if ((uint64_t)types.len > UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "the type section is too large");
	} else {
		count = find_types(&types, (uint8_t *)fixed, (uint8_t *)each, NULL);
		places = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint32_t));
	}
	if (places)
		find_types(&types, (uint8_t *)fixed, (uint8_t *)each,
			   (uint32_t *)PyBytes_AsString(places));
	PyBuffer_Release(&types);
	return places;
}
