/* Groups equal samples; pipeline/windows.py groups those with a context, labels or a wait. */
#include "speedups.h"

#define SIDE_IS_PROVISIONAL 3

struct grouping {
	PyObject *groups, *sides_name, *no_labels;
	Py_ssize_t added; /* number of new groups */
};

/* Returns whether a stack has a provisional side; -1 on failure. */
static int is_provisional(PyObject *stack, PyObject *sides_name)
{
	PyObject *sides = PyObject_GetAttr(stack, sides_name);
	int result = 0;

	if (!sides)
		return -1;
	if (check_type("sides", PyTuple_Check(sides), "tuple"))
		result = -1;
	for (Py_ssize_t at = 0; !result && at < PyTuple_Size(sides); at++) {
		PyObject *side = PyTuple_GetItem(sides, at);

		if (check_type("a side", PyTuple_Check(side) && PyTuple_Size(side) > SIDE_IS_PROVISIONAL,
			       "Side"))
			result = -1;
		else
			result = PyTuple_GetItem(side, SIDE_IS_PROVISIONAL) == Py_True;
	}
	Py_DECREF(sides);
	return result;
}

/* Starts a group, unless its stack is provisional. Returns like add(). */
static int start_group(struct grouping *grouping, PyObject *key, PyObject *stack, PyObject *time,
		       PyObject *value)
{
	int status = is_provisional(stack, grouping->sides_name);
	PyObject *series;

	if (status)
		return status < 0 ? -1 : 0;
	series = PyList_New(2);
	if (!series)
		return -1;
	PyList_SetItem(series, 0, Py_NewRef(time));
	PyList_SetItem(series, 1, Py_NewRef(value));
	status = PyDict_SetItem(grouping->groups, key, series);
	Py_DECREF(series);
	if (status)
		return -1;
	grouping->added++;
	return 1;
}

/* Adds a sample. Returns 1 if it is added, 0 if it is left, -1 on failure. */
static int add(struct grouping *grouping, PyObject *sample, PyObject *stack)
{
	PyObject *value = PyTuple_GetItem(sample, SAMPLE_VALUE), *key, *series;
	PyObject *time = PyTuple_GetItem(sample, SAMPLE_TIME);
	int status = 1;

	if (PyObject_IsTrue(PyTuple_GetItem(sample, SAMPLE_CONTEXT)) ||
	    PyTuple_GetItem(sample, SAMPLE_WAIT) != Py_None ||
	    PyObject_IsTrue(PyTuple_GetItem(sample, SAMPLE_LABELS)))
		return PyErr_Occurred() ? -1 : 0;
	key = PyTuple_Pack(7, stack, PyTuple_GetItem(sample, SAMPLE_TID),
			   PyTuple_GetItem(sample, SAMPLE_COMM), PyTuple_GetItem(sample, SAMPLE_CPU),
			   PyTuple_GetItem(sample, SAMPLE_LINK), grouping->no_labels, Py_None);
	if (!key)
		return -1;
	series = PyDict_GetItemWithError(grouping->groups, key);
	if (!series)
		status = PyErr_Occurred() ? -1 : start_group(grouping, key, stack, time, value);
	else if (check_type("a group", PyList_Check(series), "list") ||
		 PyList_Append(series, time) || PyList_Append(series, value))
		status = -1;
	Py_DECREF(key);
	return status;
}

const char group_samples_text[] = "Adds samples to groups, up to the first that it leaves.";

PyObject *group_samples(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct grouping grouping = {0};
	PyObject *samples, *stacks;
	Py_ssize_t at;
	int status = 1;

	(void)module;
	if (check_count("group_samples", count, 4) ||
	    check_type("samples", PyList_Check(arguments[0]), "list") ||
	    check_type("stacks", PyList_Check(arguments[1]), "list") ||
	    check_type("groups", PyDict_Check(arguments[3]), "dict"))
		return NULL;
	at = PyLong_AsSsize_t(arguments[2]);
	if (at == -1 && PyErr_Occurred())
		return NULL;
	samples = arguments[0];
	stacks = arguments[1];
	grouping.groups = arguments[3];
	grouping.sides_name = PyUnicode_InternFromString("sides");
	grouping.no_labels = PyTuple_New(0);
	if (!grouping.sides_name || !grouping.no_labels)
		status = -1;
	while (status > 0 && at >= 0 && at < PyList_Size(samples)) {
		PyObject *sample = PyList_GetItem(samples, at), *stack = PyList_GetItem(stacks, at);

		if (!stack || check_items("a sample", sample, SAMPLE_FIELDS)) {
			status = -1;
			break;
		}
		Py_INCREF(sample);
		Py_INCREF(stack);
		status = add(&grouping, sample, stack);
		Py_DECREF(sample);
		Py_DECREF(stack);
		at += status > 0;
	}
	Py_XDECREF(grouping.sides_name);
	Py_XDECREF(grouping.no_labels);
	return status < 0 ? NULL : Py_BuildValue("nn", at, grouping.added);
}
