/* Maps 64-bit words to frames: a hash table with open addressing and linear probing. */
#include "speedups.h"
#include <string.h>

/* Layout of a frame's word; model/user_stack.py describes it. */
#define ADDRESS_BITS 56
#define ADDRESS_MASK ((1ULL << ADDRESS_BITS) - 1)
#define SOURCE_BITS 60
#define BY_TABLE 1
#define MAPPINGS 16

#define LEAST_SLOTS 16
#define WORD_BYTES 8

struct slot {
	uint64_t key;
	PyObject *frame; /* NULL if the slot is empty */
};

struct frame_cache {
	PyObject_HEAD
	struct slot *slots;
	size_t size; /* number of slots: 0, or a power of 2 */
	size_t used;
};

static struct slot *find_slot(const struct frame_cache *cache, uint64_t key)
{
	size_t at = hash(key) & (cache->size - 1);

	while (cache->slots[at].frame && cache->slots[at].key != key)
		at = (at + 1) & (cache->size - 1);
	return &cache->slots[at];
}

/* Returns a borrowed reference; NULL if the cache does not contain the key. */
static PyObject *look_up(const struct frame_cache *cache, uint64_t key)
{
	return cache->size ? find_slot(cache, key)->frame : NULL;
}

static int grow(struct frame_cache *cache)
{
	struct slot *old = cache->slots;
	size_t old_size = cache->size, size = old_size ? 2 * old_size : LEAST_SLOTS;
	struct slot *slots = PyMem_Calloc(size, sizeof(*slots));

	if (!slots) {
		PyErr_NoMemory();
		return -1;
	}
	cache->slots = slots;
	cache->size = size;
	for (size_t at = 0; at < old_size; at++) {
		if (old[at].frame)
			*find_slot(cache, old[at].key) = old[at];
	}
	PyMem_Free(old);
	return 0;
}

static int store(struct frame_cache *cache, uint64_t key, PyObject *frame)
{
	struct slot *slot;
	PyObject *earlier;

	if (4 * (cache->used + 1) > 3 * cache->size && grow(cache))
		return -1;
	slot = find_slot(cache, key);
	earlier = slot->frame;
	slot->key = key;
	slot->frame = Py_NewRef(frame);
	if (!earlier)
		cache->used++;
	Py_XDECREF(earlier);
	return 0;
}

static void deallocate(PyObject *self)
{
	struct frame_cache *cache = (struct frame_cache *)self;

	for (size_t at = 0; at < cache->size; at++)
		Py_XDECREF(cache->slots[at].frame);
	PyMem_Free(cache->slots);
	free_object(self);
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
	return Py_NewRef(frame ? frame : Py_None);
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
	return (Py_ssize_t)((struct frame_cache *)self)->used;
}

/* Returns a borrowed reference to the frame of a word in its file's cache. Returns NULL if there is
 * none, or on failure. */
static PyObject *look_up_in_file(uint64_t word, PyObject *files, PyTypeObject *type)
{
	PyObject *file = PyTuple_GetItem(files, word >> ADDRESS_BITS & (MAPPINGS - 1));
	uint64_t bias;

	if (!file || file == Py_None)
		return NULL;
	if (!PyTuple_Check(file) || PyTuple_Size(file) != 2 ||
	    Py_TYPE(PyTuple_GetItem(file, 0)) != type) {
		PyErr_SetString(PyExc_TypeError, "a file is a FrameCache and a bias, or None");
		return NULL;
	}
	if (read_key(PyTuple_GetItem(file, 1), &bias))
		return NULL;
	return look_up((struct frame_cache *)PyTuple_GetItem(file, 0),
		       (word & ADDRESS_MASK) - 1 - bias);
}

/* Returns a new reference; NULL on failure. */
static PyObject *find_frame(struct frame_cache *cache, uint64_t word, PyObject *files,
			    PyObject *missing)
{
	PyObject *number, *frame = look_up(cache, word);

	if (!frame && word >> SOURCE_BITS == BY_TABLE) {
		frame = look_up_in_file(word, files, Py_TYPE((PyObject *)cache));
		if (frame ? store(cache, word, frame) : PyErr_Occurred() != NULL)
			return NULL;
	}
	if (frame)
		return Py_NewRef(frame);
	number = PyLong_FromUnsignedLongLong(word);
	if (!number)
		return NULL;
	frame = PyObject_CallFunctionObjArgs(missing, number, NULL);
	Py_DECREF(number);
	return frame;
}

static PyObject *find(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	PyObject *frames;
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
	frames = PyTuple_New((size - start) / WORD_BYTES);
	for (Py_ssize_t at = start; frames && at < size; at += WORD_BYTES) {
		PyObject *frame;
		uint64_t word;

		memcpy(&word, raw + at, WORD_BYTES);
		frame = find_frame((struct frame_cache *)self, word, arguments[2], arguments[3]);
		if (!frame || PyTuple_SetItem(frames, (at - start) / WORD_BYTES, frame))
			Py_CLEAR(frames);
	}
	return frames;
}

static PyMethodDef methods[] = {
	{"get", get, METH_O, "Returns the frame of a word; None if there is none."},
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
