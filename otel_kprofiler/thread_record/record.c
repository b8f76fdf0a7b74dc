/* Publishes each thread's current span for readers outside the process.
 *
 * Format: OpenTelemetry's thread context (oteps/profiles/4947-thread-ctx.md in its specification):
 * otel_thread_ctx_v1 points to the thread's record, and is null outside of spans.
 *
 * This module uses CPython's stable ABI, and is linked against no library: the interpreter that
 * loads it provides the Python and C library functions, so one binary works with both glibc and
 * musl. The module is used only by a process's main interpreter, under the GIL.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "imports.h"
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define HIDDEN_WEAK __attribute__((weak))
#define MAX_NESTED 8 /* maximum nested contexts tracked per thread; if exceeded, outer spans are not republished */
#define MAX_ATTRIBUTES 612 /* bytes; limits a record to 640 bytes, as the specification recommends */

struct record {
	uint8_t trace_id[16];
	uint8_t span_id[8];
	uint8_t valid;
	uint8_t trace_flags;
	uint16_t attributes_size;
	uint8_t attributes[MAX_ATTRIBUTES];
} __attribute__((aligned(8)));

EXPORTED __thread struct record *otel_thread_ctx_v1;
static __thread struct record own;
static __thread unsigned char followed; /* this thread's greenlets have a trace function */
static __thread unsigned char asking; /* this thread is in call_get_span_context() */
/* The innermost context that this thread entered through a hook. */
static __thread PyObject *entered;
/* Stack of contexts that C code entered through a hook; `outside`: `entered` before the entry. */
static __thread struct {
	PyObject *context, *outside;
} nested[MAX_NESTED];

/* Public CPython functions outside the stable ABI. Their signatures are the same in 3.11 to 3.14
 * (Include/cpython/context.h, longobject.h, abstract.h). */
extern int PyContext_Enter(PyObject *);
extern int PyContext_Exit(PyObject *);
extern int PyContextVar_Get(PyObject *, PyObject *, PyObject **);
extern PyObject *PyContextVar_Set(PyObject *, PyObject *);
extern int PyContextVar_Reset(PyObject *, PyObject *);
extern PyTypeObject PyContext_Type, PyContextVar_Type, PyContextToken_Type;
extern PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
/*
 * Since 3.14: registers a callback that is called after a thread switches to a different context.
 */
extern int PyContext_AddWatcher(int (*)(int, PyObject *)) HIDDEN_WEAK;
/* Since 3.13; earlier versions have only _PyLong_AsByteArray(). */
extern Py_ssize_t PyLong_AsNativeBytes(PyObject *, void *, Py_ssize_t, int) HIDDEN_WEAK;
extern int _PyLong_AsByteArray(PyObject *, unsigned char *, size_t, int, int) HIDDEN_WEAK;
#define BIG_ENDIAN_UNSIGNED (0 | 4 | 8) /* Py_ASNATIVEBYTES_*: big endian, unsigned, no negatives */

static PyObject *variable;   /* OpenTelemetry's contextvars.ContextVar */
static PyObject *span_key;   /* the span's key in a Context */
static PyObject *labels_key; /* the label set number's key in a Context */
static PyObject *encoded;    /* encoded attributes, keyed by label set number */
static PyObject *endpoints;  /* encoded name of the local root span, by span id */
static PyObject *classes;    /* span types that keep their span context in _context */
static Py_ssize_t context_at; /* offset of the current context in PyThreadState; 0: not needed */
static Py_ssize_t entered_at; /* offset of ctx_entered, which is 0 in the base context */
static PyObject *modules;    /* sys.modules */
static PyInterpreterState *interpreter; /* the main interpreter */
static PyObject *plain_set, *plain_reset, *plain_run;
static PyObject *name_context, *name_get_span_context;
static PyObject *name_greenlet, *name_gettrace, *name_settrace;
static unsigned long long failures;

static inline void fence(void)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static int write_number(PyObject *number, uint8_t *to, Py_ssize_t size)
{
	if (PyLong_AsNativeBytes) {
		Py_ssize_t needed =
			PyLong_AsNativeBytes(number, to, size, BIG_ENDIAN_UNSIGNED);
		return needed < 0 || needed > size ? -1 : 0;
	}
	return PyLong_Check(number) ? _PyLong_AsByteArray(number, to, size, 0, 0) : -1;
}

static int is_zero(const uint8_t *bytes, int size)
{
	uint8_t all = 0;

	while (size)
		all |= bytes[--size];
	return !all;
}

static int raise_now(void *exception)
{
	PyObject *value = exception;

	PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(value)), value, PyException_GetTraceback(value));
	return -1;
}

/* Raises an exception in this thread's Python code, soon after the hook has returned.
 *
 * In the main thread, the exception keeps its arguments. In other threads, where no signal handlers
 * run, PyThreadState_SetAsyncExc raises the exception without arguments. */
static void raise_later(PyObject *type, PyObject *value, PyObject *traceback)
{
	PyErr_NormalizeException(&type, &value, &traceback);
	if (traceback)
		PyException_SetTraceback(value, traceback);
	if (syscall(SYS_gettid) != getpid()) {
		PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), type);
		Py_DECREF(value);
	} else if (Py_AddPendingCall(raise_now, value)) { /* the queue of pending calls is full */
		failures++;
		Py_DECREF(value);
	}
	Py_DECREF(type);
	Py_XDECREF(traceback);
}

/* Calls get_span_context() on a span of a non-SDK class; returns null on an exception.
 *
 * The call runs Python code, and thus signal handlers. An exception from a signal handler, such as
 * KeyboardInterrupt, is meant for the service, so it is raised later. The method is called a second
 * time; an exception of the same type comes from the span itself, and is dropped.
 *
 * If the method changes the current context, the hooks run again, and the span may still be current.
 * Until the method returns, they publish only SDK spans, because another call might never end. */
static PyObject *call_get_span_context(PyObject *span)
{
	PyObject *result, *type, *value, *traceback;

	result = PyObject_CallMethodObjArgs(span, name_get_span_context, NULL);
	if (result)
		return result;
	PyErr_Fetch(&type, &value, &traceback);
	result = PyObject_CallMethodObjArgs(span, name_get_span_context, NULL);
	if (!result && PyErr_Occurred() == type &&
	    PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
		Py_DECREF(type);
		Py_XDECREF(value);
		Py_XDECREF(traceback);
	} else {
		PyObject *second[3];

		PyErr_Fetch(&second[0], &second[1], &second[2]);
		raise_later(type, value, traceback);
		PyErr_Restore(second[0], second[1], second[2]);
	}
	return result;
}

/* Appends encoded attributes, which may be null, if they fit in the record. */
static void append(PyObject *attributes)
{
	Py_ssize_t size;

	if (!attributes || !PyBytes_Check(attributes))
		return;
	size = PyBytes_Size(attributes);
	if (own.attributes_size + size <= MAX_ATTRIBUTES) {
		memcpy(own.attributes + own.attributes_size, PyBytes_AsString(attributes), size);
		own.attributes_size += (uint16_t)size;
	}
}

/* Writes ids, flags and attributes; returns the same values as describe(). */
static int fill(PyObject *span, PyObject *number)
{
	PyObject *context;
	int status = 0;

	if (PySet_Contains(classes, (PyObject *)Py_TYPE(span)) == 1)
		context = PyObject_GetAttr(span, name_context);
	else if (asking)
		return 0;
	else {
		asking = 1;
		context = call_get_span_context(span);
		asking = 0;
	}
	otel_thread_ctx_v1 = NULL; /* Python code called above may have published a record */
	own.valid = 0;
	fence();
	if (!context)
		return -1;
	/* A SpanContext is a tuple: trace_id, span_id, is_remote, trace_flags, ... */
	if (PyTuple_Check(context) && PyTuple_Size(context) >= 4) {
		long flags = PyLong_AsLong(PyTuple_GetItem(context, 3));

		own.trace_flags = (uint8_t)flags;
		own.attributes_size = 0;
		if ((flags == -1 && PyErr_Occurred()) ||
		    write_number(PyTuple_GetItem(context, 0), own.trace_id, 16) ||
		    write_number(PyTuple_GetItem(context, 1), own.span_id, 8))
			status = -1;
		else
			status = !is_zero(own.trace_id, 16) && !is_zero(own.span_id, 8);
	}
	if (status == 1) {
		PyObject *id = PyTuple_GetItem(context, 1);

		if (number)
			append(PyDict_GetItemWithError(encoded, number));
		if (PyLong_CheckExact(id)) /* hashing an object of another type may run Python code */
			append(PyDict_GetItemWithError(endpoints, id));
	}
	Py_DECREF(context);
	return status;
}

static PyObject *current_context(void)
{
	return *(PyObject **)((char *)PyThreadState_Get() + context_at);
}

static int enter(PyObject *context);
static int leave(PyObject *context);
/* Functions that C code, such as uvloop or asyncio's eager tasks, calls to change the context. */
static const struct import imports[] = {
	{"PyContext_Enter", enter}, {"PyContext_Exit", leave}, {NULL, NULL}};

/* Returns whether a hook will run when the thread leaves its current context. Without a watcher,
 * contexts entered by the interpreter itself, or by libraries loaded later, are not detected. */
static int is_followed(void)
{
	PyObject *current;

	if (!context_at)
		return 1;
	current = current_context();
	if (!current || current == entered || !*(int *)((char *)current + entered_at))
		return 1;
	replace_imports(imports);
	return 0;
}

static PyObject *refresh(PyObject *self, PyObject *arguments);
static PyMethodDef refresh_method = {"refresh", refresh, METH_VARARGS,
				     "Publish the span of the greenlet that this thread switched to."};

/* Makes this thread's greenlets call refresh() after each switch, before the existing trace
 * function, if any. */
static int follow_greenlets(PyObject *greenlet)
{
	PyObject *former, *hook, *result = NULL;

	former = PyObject_CallMethodObjArgs(greenlet, name_gettrace, NULL);
	if (!former)
		return -1;
	hook = PyCFunction_New(&refresh_method, former);
	if (hook)
		result = PyObject_CallMethodObjArgs(greenlet, name_settrace, hook, NULL);
	Py_XDECREF(hook);
	Py_DECREF(former);
	followed = result != NULL;
	Py_XDECREF(result);
	return followed ? 0 : -1;
}

/*
 * Writes this thread's record. Returns 1 if the record is complete, 0 if there is no span, -1 on
 * failure.
 */
static int describe(PyObject *context)
{
	PyObject *span, *number, *greenlet;
	int status;

	if (!PyDict_Check(context))
		return 0;
	if (!followed && (greenlet = PyDict_GetItemWithError(modules, name_greenlet)) &&
	    follow_greenlets(greenlet))
		return -1;
	span = PyDict_GetItemWithError(context, span_key);
	if (!span)
		return PyErr_Occurred() ? -1 : 0;
	number = PyDict_GetItemWithError(context, labels_key);
	Py_INCREF(span);
	Py_XINCREF(number);
	status = is_followed() ? fill(span, number) : 0;
	Py_XDECREF(number);
	Py_DECREF(span);
	return status;
}

/* Publishes the span in an OpenTelemetry Context. Must not be called with an exception set. */
static void publish(PyObject *context)
{
	int status;

	otel_thread_ctx_v1 = NULL;
	fence();
	status = describe(context);
	if (status < 0 || PyErr_Occurred()) {
		failures++;
		PyErr_Clear();
	} else if (status) {
		own.valid = 1;
		fence();
		otel_thread_ctx_v1 = &own;
	}
}

/* Returns whether the thread is in the main interpreter. The hooks also run in subinterpreters,
 * which may share types (3.11) and imports. There, the hooks must not change the published span. */
static int is_main(void)
{
	return PyInterpreterState_Get() == interpreter;
}

/* Publishes the span in the thread's current context. */
static void publish_current(void)
{
	PyObject *context = NULL, *type = NULL, *value = NULL, *traceback = NULL;

	otel_thread_ctx_v1 = NULL;
	fence();
	PyErr_Fetch(&type, &value, &traceback);
	if (PyContextVar_Get(variable, NULL, &context)) {
		failures++;
		PyErr_Clear();
	} else if (context) {
		publish(context);
		Py_DECREF(context);
	}
	PyErr_Restore(type, value, traceback);
}

static int watch(int event, PyObject *context)
{
	(void)event;
	(void)context;
	publish_current();
	return 0;
}

/* Replaces PyContext_Enter() in other libraries. */
static int enter(PyObject *context)
{
	if (PyContext_Enter(context))
		return -1;
	if (!is_main())
		return 0;
	for (int at = 0; at < MAX_NESTED; at++) {
		if (!nested[at].context) {
			nested[at].context = context;
			nested[at].outside = entered;
			break;
		}
	}
	entered = context;
	publish_current();
	return 0;
}

/* Replaces PyContext_Exit() in other libraries. */
static int leave(PyObject *context)
{
	if (!is_main())
		return PyContext_Exit(context);
	otel_thread_ctx_v1 = NULL;
	fence();
	if (PyContext_Exit(context)) {
		publish_current();
		return -1;
	}
	entered = NULL;
	for (int at = 0; at < MAX_NESTED; at++) {
		if (nested[at].context == context) {
			entered = nested[at].outside;
			nested[at].context = NULL;
			break;
		}
	}
	publish_current();
	return 0;
}

/* ContextVar.set(value) */
static PyObject *set(PyObject *self, PyObject *value)
{
	PyObject *token = PyContextVar_Set(self, value);

	if (self == variable && token)
		publish(value);
	return token;
}

/* ContextVar.reset(token) */
static PyObject *reset(PyObject *self, PyObject *token)
{
	if (Py_TYPE(token) != &PyContextToken_Type) /* raises TypeError */
		return PyObject_CallFunctionObjArgs(plain_reset, self, token, NULL);
	if (PyContextVar_Reset(self, token))
		return NULL;
	if (self == variable)
		publish_current();
	Py_RETURN_NONE;
}

/* Context.run(function, *arguments, **named): as in CPython (Python/context.c, context_run). */
static PyObject *run(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
	PyObject *result, *outside;

	if (count < 1) /* raises TypeError */
		return PyObject_CallFunctionObjArgs(plain_run, self, NULL);
	outside = entered;
	if (PyContext_Enter(self))
		return NULL;
	if (!is_main()) {
		result = PyObject_Vectorcall(arguments[0], arguments + 1, count - 1, names);
		if (PyContext_Exit(self))
			Py_CLEAR(result);
		return result;
	}
	entered = self;
	publish_current();
	result = PyObject_Vectorcall(arguments[0], arguments + 1, count - 1, names);
	otel_thread_ctx_v1 = NULL;
	fence();
	if (PyContext_Exit(self)) {
		Py_XDECREF(result);
		result = NULL;
	}
	entered = outside;
	publish_current();
	return result;
}

static PyMethodDef set_method = {
	"set", set, METH_O,
	"set($self, value, /)\n--\n\nCall to set a new value for the context variable."};
static PyMethodDef reset_method = {
	"reset", reset, METH_O,
	"reset($self, token, /)\n--\n\nReset the context variable to what it was before set()."};
static PyMethodDef run_method = {
	"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
	"run($self, callable, /, *args, **kwargs)\n--\n\nRun a callable in this context."};

/* Replaces a method of a built-in type. */
static int replace(PyObject *methods, PyTypeObject *type, PyMethodDef *definition, PyObject **plain)
{
	PyObject *method = PyDict_GetItemString(methods, definition->ml_name), *hook;
	int status;

	if (!method) {
		PyErr_Format(PyExc_LookupError, "%R has no method %s", type, definition->ml_name);
		return -1;
	}
	*plain = Py_NewRef(method);
	hook = PyDescr_NewMethod(type, definition);
	if (!hook)
		return -1;
	status = PyDict_SetItemString(methods, definition->ml_name, hook);
	Py_DECREF(hook);
	PyType_Modified(type);
	return status;
}

static void put_back(PyObject *methods, PyTypeObject *type, PyMethodDef *definition,
		     PyObject **plain)
{
	if (*plain && PyDict_SetItemString(methods, definition->ml_name, *plain))
		PyErr_WriteUnraisable(methods);
	PyType_Modified(type);
	Py_CLEAR(*plain);
}

/* Restores all methods; preserves the current exception. */
static void uninstall(PyObject *of_variables, PyObject *of_contexts)
{
	PyObject *type, *value, *traceback;

	PyErr_Fetch(&type, &value, &traceback);
	put_back(of_variables, &PyContextVar_Type, &set_method, &plain_set);
	put_back(of_variables, &PyContextVar_Type, &reset_method, &plain_reset);
	put_back(of_contexts, &PyContext_Type, &run_method, &plain_run);
	Py_CLEAR(variable);
	Py_CLEAR(span_key);
	Py_CLEAR(labels_key);
	Py_CLEAR(encoded);
	Py_CLEAR(endpoints);
	Py_CLEAR(classes);
	Py_CLEAR(modules);
	PyErr_Restore(type, value, traceback);
}

/* install(variable, span key, labels key, attributes by number, attributes by span id, classes,
 *         whether this thread runs no event loop, offset of the context in the thread state,
 *         offset of ctx_entered in the context, sys.modules, methods of ContextVar and Context) */
static PyObject *install(PyObject *self, PyObject *arguments)
{
	PyObject *of_variables, *of_contexts;
	int is_outside;

	(void)self;
	if (variable) {
		PyErr_SetString(PyExc_RuntimeError, "installed already");
		return NULL;
	}
	if (!PyArg_ParseTuple(arguments, "O!OOO!O!OpnnO!O!O!", &PyContextVar_Type, &variable, &span_key,
			      &labels_key, &PyDict_Type, &encoded, &PyDict_Type, &endpoints, &classes, &is_outside, &context_at,
			      &entered_at, &PyDict_Type, &modules, &PyDict_Type, &of_variables,
			      &PyDict_Type, &of_contexts)) {
		variable = NULL;
		return NULL;
	}
	Py_INCREF(variable);
	Py_INCREF(span_key);
	Py_INCREF(labels_key);
	Py_INCREF(encoded);
	Py_INCREF(endpoints);
	Py_INCREF(classes);
	Py_INCREF(modules);
	interpreter = PyInterpreterState_Get();
	if (PyContext_AddWatcher)
		context_at = 0;
	if (replace(of_variables, &PyContextVar_Type, &set_method, &plain_set) ||
	    replace(of_variables, &PyContextVar_Type, &reset_method, &plain_reset) ||
	    (PyContext_AddWatcher ?
		     PyContext_AddWatcher(watch) < 0 :
		     replace(of_contexts, &PyContext_Type, &run_method, &plain_run))) {
		uninstall(of_variables, of_contexts);
		return NULL;
	}
	if (context_at)
		replace_imports(imports);
	if (context_at && is_outside) /* the service never leaves its current context */
		entered = current_context();
	Py_RETURN_NONE;
}

/* Greenlet trace function, called after each switch; self: the next trace function or None. */
static PyObject *refresh(PyObject *self, PyObject *arguments)
{
	if (context_at)
		entered = current_context(); /* the new greenlet's context */
	publish_current();
	return self == Py_None ? Py_NewRef(self) : PyObject_CallObject(self, arguments);
}

static PyObject *count_failures(PyObject *self, PyObject *arguments)
{
	(void)self;
	(void)arguments;
	return PyLong_FromUnsignedLongLong(failures);
}

static PyMethodDef functions[] = {
	{"install", install, METH_VARARGS, "Install the hooks, once in a process."},
	{"count_failures", count_failures, METH_NOARGS, "Spans that could not be read."},
	{NULL, NULL, 0, NULL}};

#if defined(__x86_64__)
#define NAME "_record_x86_64"
#define INIT PyInit__record_x86_64
#elif defined(__aarch64__)
#define NAME "_record_aarch64"
#define INIT PyInit__record_aarch64
#endif

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME,
				    "Publishes the current span of each thread.", -1, functions,
				    NULL, NULL, NULL, NULL};

EXPORTED PyObject *INIT(void)
{
	name_context = PyUnicode_InternFromString("_context");
	name_get_span_context = PyUnicode_InternFromString("get_span_context");
	name_greenlet = PyUnicode_InternFromString("greenlet._greenlet");
	name_gettrace = PyUnicode_InternFromString("gettrace");
	name_settrace = PyUnicode_InternFromString("settrace");
	if (!name_context || !name_get_span_context || !name_greenlet || !name_gettrace ||
	    !name_settrace)
		return NULL;
	return PyModule_Create(&module);
}
