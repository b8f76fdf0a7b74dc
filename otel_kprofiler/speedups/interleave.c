/* Replaces the interpreter's native frames with Python frames. */
#include "speedups.h"

#define LOOP 1 /* the mark of a frame that is replaced by a chain of Python frames */

/* The chains of Python frames that are left. */
struct chains {
	PyObject *frames, *entries;
	Py_ssize_t next, start;
};

/* The sides so far. The last one is still a kind and its frames. */
struct merged {
	PyObject *sides, *type, *rest, *kind, *run;
};

/* Sets the bounds of the next chain. Returns 0 if there is none, and -1 on failure. */
static int next_chain(struct chains *chains, Py_ssize_t *start, Py_ssize_t *end)
{
	Py_ssize_t entries = PyTuple_Size(chains->entries), size = PyTuple_Size(chains->frames);

	if (chains->next > entries)
		return 0;
	*start = chains->start;
	*end = size;
	if (chains->next < entries) {
		*end = PyLong_AsSsize_t(PyTuple_GetItem(chains->entries, chains->next));
		if (*end == -1 && PyErr_Occurred())
			return -1;
		if (*end < *start || *end > size) {
			PyErr_SetString(PyExc_ValueError, "the entries are not indices in order");
			return -1;
		}
	}
	chains->next++;
	chains->start = *end;
	return 1;
}

/* Adds the last side to the list; returns -1 on failure. */
static int finish_side(struct merged *merged)
{
	Py_ssize_t rest = PyTuple_Size(merged->rest);
	PyObject *fields, *side;
	int status;

	if (!merged->run)
		return 0;
	fields = PyTuple_New(2 + rest);
	if (!fields)
		return -1;
	PyTuple_SetItem(fields, 0, Py_NewRef(merged->kind));
	PyTuple_SetItem(fields, 1, merged->run);
	merged->run = NULL;
	for (Py_ssize_t at = 0; at < rest; at++)
		PyTuple_SetItem(fields, 2 + at, Py_NewRef(PyTuple_GetItem(merged->rest, at)));
	side = new_record(merged->type, fields);
	status = side ? PyList_Append(merged->sides, side) : -1;
	Py_XDECREF(side);
	return status;
}

/* Adds frames to the last side, or to a new one of another kind; returns -1 on failure. */
static int add(struct merged *merged, PyObject *kind, PyObject *frames, Py_ssize_t start, Py_ssize_t end)
{
	PyObject *run;

	if (start >= end)
		return 0;
	run = PyTuple_GetSlice(frames, start, end);
	if (run && merged->run && merged->kind == kind) {
		PyObject *both = PySequence_Concat(merged->run, run);

		Py_DECREF(run);
		Py_DECREF(merged->run);
		merged->run = run = both;
	} else if (run) {
		if (finish_side(merged)) {
			Py_DECREF(run);
			return -1;
		}
		merged->kind = kind;
		merged->run = run;
	}
	return run ? 0 : -1;
}

static int merge(struct merged *merged, PyObject *native, const char *marks, PyObject *kinds,
		 struct chains *chains)
{
	PyObject *user = PyTuple_GetItem(kinds, 0), *python = PyTuple_GetItem(kinds, 1);
	Py_ssize_t size = PyTuple_Size(native), kept = 0, start, end;
	int status;

	for (Py_ssize_t at = 0; at < size; at++) {
		if (!marks[at])
			continue;
		start = end = 0;
		if (marks[at] == LOOP) {
			status = next_chain(chains, &start, &end);
			if (status < 0)
				return -1;
			if (!status)
				continue;
		}
		if (add(merged, user, native, kept, at) ||
		    add(merged, python, chains->frames, start, end))
			return -1;
		kept = at + 1;
	}
	if (add(merged, user, native, kept, size))
		return -1;
	while ((status = next_chain(chains, &start, &end)) > 0)
		if (add(merged, python, chains->frames, start, end))
			return -1;
	return status ? -1 : finish_side(merged);
}

const char interleave_text[] = "Returns sides of alternating kinds.";

PyObject *interleave(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct chains chains;
	struct merged merged = {0};
	Py_ssize_t marked;
	char *marks;

	(void)module;
	if (check_count("interleave", count, 7) ||
	    check_type("native", PyTuple_Check(arguments[0]), "tuple") ||
	    PyBytes_AsStringAndSize(arguments[1], &marks, &marked) ||
	    check_items("native", arguments[0], marked) ||
	    check_type("python", PyTuple_Check(arguments[2]), "tuple") ||
	    check_type("entries", PyTuple_Check(arguments[3]), "tuple") ||
	    check_items("kinds", arguments[5], 2) ||
	    check_type("rest", PyTuple_Check(arguments[6]), "tuple"))
		return NULL;
	chains = (struct chains){arguments[2], arguments[3], 0, 0};
	merged.type = arguments[4];
	merged.rest = arguments[6];
	merged.sides = PyList_New(0);
	if (merged.sides && merge(&merged, arguments[0], marks, arguments[5], &chains))
		Py_CLEAR(merged.sides);
	Py_XDECREF(merged.run);
	return merged.sides;
}
