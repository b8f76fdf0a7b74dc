/* Finds the stacks of samples in caches; symbols/resolver.py resolves all others. */
#include "speedups.h"

#define KEY_STATES 2 /* index of the first state in a key; collection outcomes and raw stacks precede it */

struct finder {
	PyObject *state_functions, *recent, *earlier, *sides, *side_type, *make;
	Py_ssize_t raw_bytes; /* of the stacks added to `recent` */
};

/* Returns a user side with the frames of a raw stack: a new reference. Returns NULL on failure, and
 * without an exception if a frame is neither found nor made. */
static PyObject *make_user_side(PyObject *type, PyObject *outcome, PyObject *raw, PyObject *tables)
{
	PyObject *frames = find_user_frames(raw, tables), *entries, *fields;

	if (!frames)
		return NULL;
	entries = PyTuple_New(0);
	fields = entries ? PyTuple_Pack(5, PyTuple_GetItem(outcome, 0), frames,
					PyTuple_GetItem(outcome, 1), Py_False, entries)
			 : NULL;
	Py_XDECREF(entries);
	Py_DECREF(frames);
	return fields ? new_record(type, fields) : NULL;
}

/* Returns a side of the stack with this key: a new reference. Returns NULL on failure, and without
 * an exception if the side is not found. */
static PyObject *find_side(const struct finder *finder, PyObject *key, Py_ssize_t index)
{
	PyObject *outcome = PyTuple_GetItem(PyTuple_GetItem(key, 0), index);
	PyObject *raw = PyTuple_GetItem(PyTuple_GetItem(key, 1), index);
	PyObject *source, *cache, *state = Py_None, *side_key, *side;
	Py_ssize_t at;

	if (!outcome || !raw || check_items("an outcome", outcome, 2))
		return NULL;
	source = PyDict_GetItemWithError(finder->sides, PyTuple_GetItem(outcome, 0));
	if (!source || check_items("a source of sides", source, 2))
		return NULL;
	cache = PyTuple_GetItem(source, 0);
	if (check_type("cached sides", PyDict_Check(cache), "dict"))
		return NULL;
	if (PyTuple_GetItem(source, 1) == Py_None)
		return make_user_side(finder->side_type, outcome, raw, cache);
	at = PyLong_AsSsize_t(PyTuple_GetItem(source, 1));
	if (at == -1 && PyErr_Occurred())
		return NULL;
	if (at >= 0 && !(state = PyTuple_GetItem(key, at)))
		return NULL;
	side_key = PyTuple_Pack(3, raw, PyTuple_GetItem(outcome, 1), state);
	if (!side_key)
		return NULL;
	side = PyDict_GetItemWithError(cache, side_key);
	side = side && (PyObject *)Py_TYPE(side) == finder->side_type ? Py_NewRef(side) : NULL;
	Py_DECREF(side_key);
	return side;
}

/* Makes a stack from cached sides. Returns like find_side(). */
static PyObject *make_stack(const struct finder *finder, PyObject *key)
{
	Py_ssize_t size = PyTuple_Size(PyTuple_GetItem(key, 0));
	PyObject *sides = PyTuple_New(size), *stack;

	for (Py_ssize_t at = 0; sides && at < size; at++) {
		PyObject *side = find_side(finder, key, at);

		if (!side || PyTuple_SetItem(sides, at, side))
			Py_CLEAR(sides);
	}
	if (!sides)
		return NULL;
	stack = PyObject_CallFunctionObjArgs(finder->make, sides, NULL);
	Py_DECREF(sides);
	return stack;
}

static PyObject *make_key(const struct finder *finder, PyObject *sample)
{
	Py_ssize_t states = PyTuple_Size(finder->state_functions);
	PyObject *key = PyTuple_New(KEY_STATES + states);

	if (!key)
		return NULL;
	PyTuple_SetItem(key, 0, Py_NewRef(PyTuple_GetItem(sample, SAMPLE_COLLECTED)));
	PyTuple_SetItem(key, 1, Py_NewRef(PyTuple_GetItem(sample, SAMPLE_STACKS)));
	for (Py_ssize_t at = 0; at < states; at++) {
		PyObject *function = PyTuple_GetItem(finder->state_functions, at);
		PyObject *state = PyObject_CallFunctionObjArgs(function, sample, NULL);

		if (!state || PyTuple_SetItem(key, KEY_STATES + at, state)) {
			Py_DECREF(key);
			return NULL;
		}
	}
	if (check_type("outcomes", PyTuple_Check(PyTuple_GetItem(key, 0)), "tuple") ||
	    check_type("stacks", PyTuple_Check(PyTuple_GetItem(key, 1)), "tuple"))
		Py_CLEAR(key);
	return key;
}

/* Adds a stack to the recent ones; returns -1 on failure. */
static int keep(struct finder *finder, PyObject *key, PyObject *stack)
{
	PyObject *raw = PyTuple_GetItem(key, 1);

	for (Py_ssize_t at = 0; at < PyTuple_Size(raw); at++) {
		Py_ssize_t size = PyObject_Size(PyTuple_GetItem(raw, at));

		if (size < 0)
			return -1;
		finder->raw_bytes += size;
	}
	return PyDict_SetItem(finder->recent, key, stack);
}

/* Returns the stack of a sample: a new reference; None if the stack is left; NULL on failure. */
static PyObject *find_stack(struct finder *finder, PyObject *sample)
{
	PyObject *key = make_key(finder, sample), *stack;

	if (!key)
		return NULL;
	stack = Py_XNewRef(PyDict_GetItemWithError(finder->recent, key));
	if (!stack && !PyErr_Occurred()) {
		stack = Py_XNewRef(PyDict_GetItemWithError(finder->earlier, key));
		if (!stack && !PyErr_Occurred())
			stack = make_stack(finder, key);
		if (stack && keep(finder, key, stack))
			Py_CLEAR(stack);
	}
	Py_DECREF(key);
	return stack || PyErr_Occurred() ? stack : Py_NewRef(Py_None);
}

const char find_stacks_text[] = "Adds the stack of each sample to a list; None if it leaves a stack.";

PyObject *find_stacks(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct finder finder;

	(void)module;
	if (check_count("find_stacks", count, 8) ||
	    check_type("samples", PyList_Check(arguments[0]), "list") ||
	    check_type("states", PyTuple_Check(arguments[1]), "tuple") ||
	    check_type("recent", PyDict_Check(arguments[2]), "dict") ||
	    check_type("earlier", PyDict_Check(arguments[3]), "dict") ||
	    check_type("sides", PyDict_Check(arguments[4]), "dict") ||
	    check_type("stacks", PyList_Check(arguments[7]), "list"))
		return NULL;
	finder = (struct finder){arguments[1], arguments[2], arguments[3], arguments[4],
				 arguments[5], arguments[6], 0};
	for (Py_ssize_t at = 0; at < PyList_Size(arguments[0]); at++) {
		PyObject *sample = Py_NewRef(PyList_GetItem(arguments[0], at)), *stack = NULL;
		int status = -1;

		if (!check_items("a sample", sample, SAMPLE_FIELDS))
			stack = find_stack(&finder, sample);
		if (stack)
			status = PyList_Append(arguments[7], stack);
		Py_XDECREF(stack);
		Py_DECREF(sample);
		if (status)
			return NULL;
	}
	return PyLong_FromSsize_t(finder.raw_bytes);
}
