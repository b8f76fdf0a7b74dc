/* Defines the extension module, and functions that its types share.
 *
 * The module uses CPython's stable ABI, and is linked against no library: the interpreter that loads
 * it provides the Python and C library functions, so one binary works with both glibc and musl. All
 * functions require the GIL.
 *
 * The types take no part in garbage collection, because frames never refer to the tables that
 * contain them. After a call of Python code, functions look up the table's entries again, because that
 * code may have changed the same table.
 */
#include "speedups.h"

/* Raises TypeError and returns -1 if a function was called with the wrong number of arguments. */
int check_count(const char *name, Py_ssize_t count, Py_ssize_t expected)
{
	if (count == expected)
		return 0;
	PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", name, expected, count);
	return -1;
}

/* Raises TypeError and returns -1 if an argument does not have the required type. */
int check_type(const char *name, int has_type, const char *type)
{
	if (has_type)
		return 0;
	PyErr_Format(PyExc_TypeError, "%s must be a %s", name, type);
	return -1;
}

/* Raises TypeError and returns -1 if an argument is not a tuple of the required size. */
int check_items(const char *name, PyObject *tuple, Py_ssize_t size)
{
	if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == size)
		return 0;
	PyErr_Format(PyExc_TypeError, "%s must have %zd fields", name, size);
	return -1;
}

/* Returns an object of a tuple type, such as a named tuple, and releases the tuple of its fields.
 * Returns NULL on failure. */
PyObject *new_record(PyObject *type, PyObject *fields)
{
	newfunc new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
	PyObject *arguments, *record = NULL;

	if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
		PyErr_SetString(PyExc_TypeError, "the type must be a subtype of tuple");
		Py_DECREF(fields);
		return NULL;
	}
	arguments = PyTuple_Pack(1, fields);
	if (arguments) {
		record = new_tuple((PyTypeObject *)type, arguments, NULL);
		Py_DECREF(arguments);
	}
	Py_DECREF(fields);
	return record;
}

/* Frees an object whose contents have been released. */
void free_object(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc free_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);

	free_memory(self);
	Py_DECREF(type); /* objects own a reference to a heap type */
}

static int add_type(PyObject *module, PyType_Spec *spec)
{
	PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
	int status = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

	Py_XDECREF(type);
	return status;
}

static int execute(PyObject *module)
{
	return add_type(module, &frame_cache_spec) || add_type(module, &frame_tokens_spec) ? -1 : 0;
}

#define FUNCTION(name) {#name, FAST(name), name##_text}

static PyMethodDef functions[] = {
	FUNCTION(encode_samples),
	FUNCTION(parse_samples),
	FUNCTION(add_go_functions),
	FUNCTION(pack_pairs),
	FUNCTION(find_btf_types),
	FUNCTION(find_line),
	FUNCTION(find_stacks),
	FUNCTION(group_samples),
	FUNCTION(interleave),
	{NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "speedups",
	.m_doc = "Inner loops that run for each frame, record, function or type.",
	.m_methods = functions,
	.m_slots = slots,
};

#define DEFINE_INIT(processor) \
	PyMODINIT_FUNC PyInit__speedups_##processor(void) { return PyModuleDef_Init(&definition); }

#if defined(__x86_64__)
DEFINE_INIT(x86_64)
#elif defined(__aarch64__)
DEFINE_INIT(aarch64)
#endif
