/* Maps frames, compared by identity, to their uses and tokens: a hash table with linear probing.
 *
 * The uses are in an array, in the order in which frames were added. The hash table contains indices
 * into this array.
 */
#include "speedups.h"
#include <string.h>

#define LEAST_SLOTS 256
#define MAX_TOKEN_BYTES 11
#define BUFFER_BYTES 4096

struct use {
	PyObject *frame;
	uint32_t count;
	uint8_t token_bytes; /* 0: no token yet */
	char token[MAX_TOKEN_BYTES];
};

struct frame_tokens {
	PyObject_HEAD
	struct use *uses;
	uint32_t *slots; /* one plus the index of a use; 0 if the slot is empty */
	uint32_t size; /* number of slots: 0, or a power of 2 */
	uint32_t used;
};

static uint32_t *find_slot(const struct frame_tokens *tokens, PyObject *frame)
{
	uint32_t mask = tokens->size - 1, at = (uint32_t)hash((uintptr_t)frame) & mask;

	while (tokens->slots[at] && tokens->uses[tokens->slots[at] - 1].frame != frame)
		at = (at + 1) & mask;
	return &tokens->slots[at];
}

static struct use *look_up(const struct frame_tokens *tokens, PyObject *frame)
{
	uint32_t *slot = tokens->size ? find_slot(tokens, frame) : NULL;

	return slot && *slot ? &tokens->uses[*slot - 1] : NULL;
}

static int grow(struct frame_tokens *tokens)
{
	uint32_t size = tokens->size ? 2 * tokens->size : LEAST_SLOTS;
	uint32_t *slots = size > tokens->size ? PyMem_Calloc(size, sizeof(*slots)) : NULL;
	struct use *uses = slots ? PyMem_Realloc(tokens->uses, size * sizeof(*uses)) : NULL;

	if (!uses) {
		PyMem_Free(slots);
		PyErr_NoMemory();
		return -1;
	}
	PyMem_Free(tokens->slots);
	tokens->slots = slots;
	tokens->uses = uses;
	tokens->size = size;
	for (uint32_t at = 0; at < tokens->used; at++)
		*find_slot(tokens, uses[at].frame) = at + 1;
	return 0;
}

/* Returns a frame's use, after adding it if it is new; NULL on failure. */
static struct use *find_use(struct frame_tokens *tokens, PyObject *frame)
{
	struct use *use = look_up(tokens, frame);

	if (use)
		return use;
	if (4ULL * (tokens->used + 1) > 3ULL * tokens->size && grow(tokens))
		return NULL;
	use = &tokens->uses[tokens->used];
	memset(use, 0, sizeof(*use));
	use->frame = Py_NewRef(frame);
	*find_slot(tokens, frame) = ++tokens->used;
	return use;
}

static void deallocate(PyObject *self)
{
	struct frame_tokens *tokens = (struct frame_tokens *)self;

	for (uint32_t at = 0; at < tokens->used; at++)
		Py_DECREF(tokens->uses[at].frame);
	PyMem_Free(tokens->uses);
	PyMem_Free(tokens->slots);
	free_object(self);
}

static PyObject *count_frames(PyObject *self, PyObject *frames)
{
	if (check_type("frames", PyTuple_Check(frames), "tuple"))
		return NULL;
	for (Py_ssize_t at = 0; at < PyTuple_Size(frames); at++) {
		struct use *use = find_use((struct frame_tokens *)self, PyTuple_GetItem(frames, at));

		if (!use)
			return NULL;
		use->count++;
	}
	Py_RETURN_NONE;
}

static PyObject *counts(PyObject *self, PyObject *unused)
{
	const struct frame_tokens *tokens = (struct frame_tokens *)self;
	PyObject *list = PyList_New(0);

	(void)unused;
	for (uint32_t at = 0; list && at < tokens->used; at++) {
		const struct use *use = &tokens->uses[at];
		PyObject *pair;

		if (!use->count)
			continue;
		pair = Py_BuildValue("OI", use->frame, use->count);
		if (!pair || PyList_Append(list, pair))
			Py_CLEAR(list);
		Py_XDECREF(pair);
	}
	return list;
}

static PyObject *get(PyObject *self, PyObject *frame)
{
	const struct use *use = look_up((struct frame_tokens *)self, frame);

	if (!use || !use->token_bytes)
		Py_RETURN_NONE;
	return PyBytes_FromStringAndSize(use->token, use->token_bytes);
}

static int set_item(PyObject *self, PyObject *frame, PyObject *token)
{
	struct use *use;
	Py_ssize_t size;
	char *bytes;

	if (!token) {
		PyErr_SetString(PyExc_TypeError, "tokens cannot be removed");
		return -1;
	}
	if (PyBytes_AsStringAndSize(token, &bytes, &size))
		return -1;
	if (!size || size > MAX_TOKEN_BYTES) {
		PyErr_Format(PyExc_ValueError, "a token has 1 to %d bytes", MAX_TOKEN_BYTES);
		return -1;
	}
	use = find_use((struct frame_tokens *)self, frame);
	if (!use)
		return -1;
	memcpy(use->token, bytes, size);
	use->token_bytes = (uint8_t)size;
	return 0;
}

/* Writes a frame's token, and returns its size; -1 on failure. */
static Py_ssize_t write_token(PyObject *self, PyObject *frame, PyObject *missing, char *to)
{
	const struct use *use = look_up((struct frame_tokens *)self, frame);

	if (!use || !use->token_bytes) {
		PyObject *token = PyObject_CallFunctionObjArgs(missing, frame, NULL);

		if (!token)
			return -1;
		Py_DECREF(token); /* the call has stored it */
		use = look_up((struct frame_tokens *)self, frame);
		if (!use || !use->token_bytes) {
			PyErr_SetString(PyExc_ValueError, "the frame still has no token");
			return -1;
		}
	}
	memcpy(to, use->token, MAX_TOKEN_BYTES);
	return use->token_bytes;
}

static PyObject *join(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	char buffer[BUFFER_BYTES], *bytes = buffer, *separator;
	Py_ssize_t size, separator_bytes, end = 0;
	PyObject *frames, *joined = NULL;

	if (check_count("join", count, 3) ||
	    check_type("frames", PyTuple_Check(arguments[0]), "tuple") ||
	    PyBytes_AsStringAndSize(arguments[1], &separator, &separator_bytes))
		return NULL;
	frames = arguments[0];
	size = PyTuple_Size(frames);
	if (size > BUFFER_BYTES / (MAX_TOKEN_BYTES + separator_bytes)) {
		bytes = size < PY_SSIZE_T_MAX / (MAX_TOKEN_BYTES + separator_bytes) ?
			PyMem_Malloc(size * (MAX_TOKEN_BYTES + separator_bytes)) : NULL;
		if (!bytes)
			return PyErr_NoMemory();
	}
	for (Py_ssize_t at = 0; at < size; at++) {
		Py_ssize_t written;

		if (at) {
			memcpy(bytes + end, separator, separator_bytes);
			end += separator_bytes;
		}
		written = write_token(self, PyTuple_GetItem(frames, at), arguments[2], bytes + end);
		if (written < 0)
			goto out;
		end += written;
	}
	joined = PyBytes_FromStringAndSize(bytes, end);
out:
	if (bytes != buffer)
		PyMem_Free(bytes);
	return joined;
}

static PyMethodDef methods[] = {
	{"count", count_frames, METH_O, "Counts one more use of each frame in a tuple."},
	{"counts", counts, METH_NOARGS,
	 "Returns the counted frames and their uses, in the order in which they were added."},
	{"get", get, METH_O, "Returns the token of a frame; None if it has none."},
	{"join", FAST(join),
	 "Returns the tokens of the frames in a tuple, separated."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "Counts the uses of frames, and maps frames to tokens."},
	{Py_tp_dealloc, deallocate},
	{Py_tp_methods, methods},
	{Py_mp_ass_subscript, set_item},
	{0, NULL},
};

PyType_Spec frame_tokens_spec = {
	"otel_kprofiler.speedups.FrameTokens",
	sizeof(struct frame_tokens),
	0,
	Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	slots,
};
