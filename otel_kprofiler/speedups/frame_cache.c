/* Maps 64-bit words to frames: hash tables with open addressing and linear probing. */
#include "speedups.h"
#include <string.h>

/* Layout of a frame's word; model/user_stack.py describes it. */
#define ADDRESS_BITS 56
#define ADDRESS_MASK ((1ULL << ADDRESS_BITS) - 1)
#define SOURCE_BITS 60
#define BY_TABLE 1 /* 0: the leaf, or a signal trampoline */
#define MAPPINGS 16

#define LEAST_SLOTS 16

struct slot {
	uint64_t key;
	PyObject *frame; /* NULL if the slot is empty */
};

struct table {
	struct slot *slots;
	size_t size; /* number of slots: 0, or a power of 2 */
	size_t used;
};

struct frame_cache {
	PyObject_HEAD
	struct table recent; /* frames used since the last call of age() */
	struct table earlier; /* frames last used before it */
};

static struct slot *find_slot(const struct table *table, uint64_t key)
{
	size_t at = hash(key) & (table->size - 1);

	while (table->slots[at].frame && table->slots[at].key != key)
		at = (at + 1) & (table->size - 1);
	return &table->slots[at];
}

static int grow(struct table *table)
{
	struct slot *old = table->slots;
	size_t old_size = table->size, size = old_size ? 2 * old_size : LEAST_SLOTS;
	struct slot *slots = PyMem_Calloc(size, sizeof(*slots));

	if (!slots) {
		PyErr_NoMemory();
		return -1;
	}
	table->slots = slots;
	table->size = size;
	for (size_t at = 0; at < old_size; at++) {
		if (old[at].frame)
			*find_slot(table, old[at].key) = old[at];
	}
	PyMem_Free(old);
	return 0;
}

static int store(struct frame_cache *cache, uint64_t key, PyObject *frame)
{
	struct table *table = &cache->recent;
	struct slot *slot;
	PyObject *replaced;

	if (4 * (table->used + 1) > 3 * table->size && grow(table))
		return -1;
	slot = find_slot(table, key);
	replaced = slot->frame;
	slot->key = key;
	slot->frame = Py_NewRef(frame);
	if (!replaced)
		table->used++;
	Py_XDECREF(replaced);
	return 0;
}

/* Returns a borrowed reference. Returns NULL if the cache does not contain the key, or on failure. */
static PyObject *look_up(struct frame_cache *cache, uint64_t key)
{
	PyObject *frame = cache->recent.size ? find_slot(&cache->recent, key)->frame : NULL;

	if (!frame && cache->earlier.size) {
		frame = find_slot(&cache->earlier, key)->frame;
		if (frame && store(cache, key, frame))
			return NULL;
	}
	return frame;
}

static void clear(struct table *table)
{
	struct table cleared = *table;

	memset(table, 0, sizeof(*table));
	for (size_t at = 0; at < cleared.size; at++)
		Py_XDECREF(cleared.slots[at].frame);
	PyMem_Free(cleared.slots);
}

static void deallocate(PyObject *self)
{
	clear(&((struct frame_cache *)self)->recent);
	clear(&((struct frame_cache *)self)->earlier);
	free_object(self);
}

static PyObject *age(PyObject *self, PyObject *unused)
{
	struct frame_cache *cache = (struct frame_cache *)self;
	struct table recent = cache->recent;

	(void)unused;
	memset(&cache->recent, 0, sizeof(cache->recent));
	clear(&cache->earlier);
	cache->earlier = recent;
	return PyLong_FromSize_t(recent.used);
}

static PyObject *get_any(PyObject *self, PyObject *unused)
{
	const struct table *table = &((struct frame_cache *)self)->recent;

	(void)unused;
	for (size_t at = 0; at < table->size; at++) {
		if (table->slots[at].frame)
			return Py_NewRef(table->slots[at].frame);
	}
	Py_RETURN_NONE;
}

static int read_key(PyObject *number, uint64_t *key)
{
	*key = PyLong_AsUnsignedLongLong(number);
	return *key == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static PyObject *get(PyObject *self, PyObject *number)
{
	PyObject *frame;
	uint64_t key;

	if (read_key(number, &key))
		return NULL;
	frame = look_up((struct frame_cache *)self, key);
	return frame || !PyErr_Occurred() ? Py_NewRef(frame ? frame : Py_None) : NULL;
}

static int set_item(PyObject *self, PyObject *number, PyObject *frame)
{
	uint64_t key;

	if (!frame) {
		PyErr_SetString(PyExc_TypeError, "frames cannot be removed from a FrameCache");
		return -1;
	}
	if (read_key(number, &key))
		return -1;
	return store((struct frame_cache *)self, key, frame);
}

static Py_ssize_t length(PyObject *self)
{
	return (Py_ssize_t)((struct frame_cache *)self)->recent.used;
}

/* Reads a field of a tuple as an unsigned integer. */
static int read_field(PyObject *tuple, Py_ssize_t at, uint64_t *number)
{
	PyObject *field = PyTuple_GetItem(tuple, at);

	return field ? read_key(field, number) : -1;
}

/* Returns the frame of code in a file: a new reference; NULL on failure. */
static PyObject *make_frame(PyObject *pattern, uint64_t offset)
{
	PyObject *type, *segments, *module, *rest, *fields, *number;
	uint64_t address = offset;
	Py_ssize_t count;

	if (!PyArg_ParseTuple(pattern, "OO!OO!:pattern", &type, &PyTuple_Type, &segments, &module,
			      &PyTuple_Type, &rest))
		return NULL;
	for (Py_ssize_t at = 0; at < PyTuple_Size(segments); at++) {
		uint64_t start, size, segment_address;
		PyObject *segment = PyTuple_GetItem(segments, at);

		if (check_type("a segment", PyTuple_Check(segment), "tuple") ||
		    read_field(segment, 0, &start) || read_field(segment, 1, &size) ||
		    read_field(segment, 2, &segment_address) || !PyTuple_GetItem(segment, 3))
			return NULL;
		if (offset >= start && offset - start < size) {
			address = segment_address + (offset - start);
			module = PyTuple_GetItem(segment, 3);
		}
	}
	number = PyLong_FromUnsignedLongLong(address);
	count = PyTuple_Size(rest);
	fields = number ? PyTuple_New(2 + count) : NULL;
	if (!fields) {
		Py_XDECREF(number);
		return NULL;
	}
	PyTuple_SetItem(fields, 0, Py_NewRef(module));
	PyTuple_SetItem(fields, 1, number);
	for (Py_ssize_t at = 0; at < count; at++)
		PyTuple_SetItem(fields, 2 + at, Py_NewRef(PyTuple_GetItem(rest, at)));
	return new_record(type, fields);
}

/* Finds or makes the frame of a word in its file. Returns a new reference. Returns NULL, without an
 * exception, if the word is left to `missing`. */
static PyObject *find_in_file(uint64_t word, PyObject *files, PyTypeObject *type)
{
	PyObject *file = PyTuple_GetItem(files, word >> ADDRESS_BITS & (MAPPINGS - 1));
	struct frame_cache *cache;
	PyObject *frame, *pattern;
	uint64_t bias, offset;

	if (!file || file == Py_None)
		return NULL;
	if (!PyTuple_Check(file) || PyTuple_Size(file) != 3 ||
	    Py_TYPE(PyTuple_GetItem(file, 0)) != type) {
		PyErr_SetString(PyExc_TypeError,
				"a file is a FrameCache, a bias and a pattern, or None");
		return NULL;
	}
	if (read_field(file, 1, &bias))
		return NULL;
	cache = (struct frame_cache *)PyTuple_GetItem(file, 0);
	offset = (word & ADDRESS_MASK) - (word >> SOURCE_BITS) - bias; /* 1 less for callers */
	frame = look_up(cache, offset);
	if (frame || PyErr_Occurred())
		return Py_XNewRef(frame);
	pattern = PyTuple_GetItem(file, 2);
	if (pattern == Py_None)
		return NULL;
	if (check_type("a pattern", PyTuple_Check(pattern), "tuple"))
		return NULL;
	frame = make_frame(pattern, offset);
	if (frame && store(cache, offset, frame))
		Py_CLEAR(frame);
	return frame;
}

/* Returns a new reference. Returns NULL on failure, and without an exception if the frame is neither found
 * nor made, and `missing` is NULL. */
static PyObject *find_frame(struct frame_cache *cache, uint64_t word, PyObject *files,
			    PyObject *missing)
{
	PyObject *number, *frame = look_up(cache, word);

	if (frame)
		return Py_NewRef(frame);
	if (!PyErr_Occurred() && word >> SOURCE_BITS <= BY_TABLE) {
		frame = find_in_file(word, files, Py_TYPE((PyObject *)cache));
		if (frame && store(cache, word, frame))
			Py_CLEAR(frame);
	}
	if (frame || !missing || PyErr_Occurred())
		return frame;
	number = PyLong_FromUnsignedLongLong(word);
	if (!number)
		return NULL;
	frame = PyObject_CallFunctionObjArgs(missing, number, NULL);
	Py_DECREF(number);
	return frame;
}

/* Returns the frames of all words. If a frame is neither found nor made, calls `missing`, or returns NULL
 * without an exception if `missing` is NULL. Returns NULL on failure. */
static PyObject *find_all(struct frame_cache *cache, const char *words, Py_ssize_t size,
			  PyObject *files, PyObject *missing)
{
	PyObject *frames = PyTuple_New(size / WORD_BYTES);

	for (Py_ssize_t at = 0; frames && at < size / WORD_BYTES; at++) {
		PyObject *frame;
		uint64_t word;

		memcpy(&word, words + at * WORD_BYTES, WORD_BYTES);
		frame = find_frame(cache, word, files, missing);
		if (!frame || PyTuple_SetItem(frames, at, frame))
			Py_CLEAR(frames);
	}
	return frames;
}

static PyObject *find(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	Py_ssize_t size, start;
	char *raw;

	if (check_count("find", count, 4) || PyBytes_AsStringAndSize(arguments[0], &raw, &size) ||
	    check_type("files", PyTuple_Check(arguments[2]), "tuple"))
		return NULL;
	start = PyLong_AsSsize_t(arguments[1]);
	if (start == -1 && PyErr_Occurred())
		return NULL;
	if (start < 0 || start > size || (size - start) % WORD_BYTES) {
		PyErr_SetString(PyExc_ValueError, "the stack does not consist of whole words");
		return NULL;
	}
	return find_all((struct frame_cache *)self, raw + start, size - start, arguments[2],
			arguments[3]);
}

/* Returns the frames of a raw user stack: a new reference. Returns NULL on failure, and without an
 * exception if the stack is malformed, or a frame is neither found nor made. */
PyObject *find_user_frames(PyObject *stack, PyObject *tables)
{
	PyObject *mappings, *table, *frames;
	Py_ssize_t size, start;
	char *raw;

	if (PyBytes_AsStringAndSize(stack, &raw, &size) ||
	    check_type("tables", PyDict_Check(tables), "dict"))
		return NULL;
	start = size < USER_HEAD_BYTES ? 0 : USER_HEAD_BYTES + (uint8_t)raw[1] * MAPPING_BYTES;
	if (!start || start > size || (size - start) % WORD_BYTES)
		return NULL;
	mappings = PyBytes_FromStringAndSize(raw + USER_HEAD_BYTES, start - USER_HEAD_BYTES);
	if (!mappings)
		return NULL;
	table = PyDict_GetItemWithError(tables, mappings);
	Py_DECREF(mappings);
	if (!table)
		return NULL;
	if (!PyTuple_Check(table) || PyTuple_Size(table) != 2 ||
	    PyType_GetSlot(Py_TYPE(PyTuple_GetItem(table, 0)), Py_tp_dealloc) != deallocate ||
	    !PyTuple_Check(PyTuple_GetItem(table, 1))) {
		PyErr_SetString(PyExc_TypeError, "a table is a FrameCache and its files");
		return NULL;
	}
	Py_INCREF(table); /* garbage collection may run code that drops it */
	frames = find_all((struct frame_cache *)PyTuple_GetItem(table, 0), raw + start,
			  size - start, PyTuple_GetItem(table, 1), NULL);
	Py_DECREF(table);
	return frames;
}

static PyMethodDef methods[] = {
	{"get", get, METH_O, "Returns the frame of a word; None if there is none."},
	{"get_any", get_any, METH_NOARGS, "Returns a frame used since the last call of age()."},
	{"age", age, METH_NOARGS, "Drops the frames not used since the last call."},
	{"find", FAST(find),
	 "Returns the frames of all words in a raw stack."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "Maps 64-bit words to frames."},
	{Py_tp_dealloc, deallocate},
	{Py_tp_methods, methods},
	{Py_mp_ass_subscript, set_item},
	{Py_mp_length, length},
	{0, NULL},
};

PyType_Spec frame_cache_spec = {
	"otel_kprofiler.speedups.FrameCache",
	sizeof(struct frame_cache),
	0,
	Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	slots,
};
