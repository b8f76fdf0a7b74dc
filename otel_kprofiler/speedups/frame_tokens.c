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

/* Fields of a frame that its kind consists of, and fields of a side; model/stack.py describes them. */
#define FRAME_FIELDS 8
#define FIRST_KIND_FIELD 4
#define KIND_FIELDS 5
#define SIDE_FRAMES 1
#define SIDE_STATUS 2
#define RECENT_KINDS 64

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

/* Returns the frames of a side, a borrowed reference; NULL, without an error, if they are no tuple. */
static PyObject *side_frames(PyObject *sides, Py_ssize_t at)
{
	PyObject *side = PyTuple_GetItem(sides, at);
	PyObject *frames = PyTuple_Check(side) && PyTuple_Size(side) > SIDE_FRAMES ?
		PyTuple_GetItem(side, SIDE_FRAMES) : NULL;

	return frames && PyTuple_Check(frames) ? frames : NULL;
}

static PyObject *count_frames(PyObject *self, PyObject *sides)
{
	int is_complete = 1;

	if (check_type("sides", PyTuple_Check(sides), "tuple"))
		return NULL;
	for (Py_ssize_t side = 0; side < PyTuple_Size(sides); side++) {
		PyObject *frames = side_frames(sides, side);
		Py_ssize_t size = frames ? PyTuple_Size(frames) : 0;

		is_complete &= frames != NULL;
		for (Py_ssize_t at = 0; at < size; at++) {
			struct use *use = find_use((struct frame_tokens *)self,
						   PyTuple_GetItem(frames, at));

			if (!use)
				return NULL;
			use->count++;
		}
	}
	return PyBool_FromLong(is_complete);
}

static PyObject *most_used(PyObject *self, PyObject *argument)
{
	const struct frame_tokens *tokens = (struct frame_tokens *)self;
	Py_ssize_t limit = PyLong_AsSsize_t(argument), found = 0;
	uint32_t *places; /* of the uses, with decreasing counts */
	PyObject *list;

	if (limit == -1 && PyErr_Occurred())
		return NULL;
	if (limit > tokens->used)
		limit = tokens->used;
	places = PyMem_Malloc(limit > 0 ? limit * sizeof(*places) : 1);
	if (!places)
		return PyErr_NoMemory();
	for (uint32_t at = 0; at < tokens->used && limit > 0; at++) {
		uint32_t count = tokens->uses[at].count;
		Py_ssize_t place;

		if (!count || (found == limit && count <= tokens->uses[places[found - 1]].count))
			continue;
		place = found < limit ? found++ : found - 1;
		for (; place && tokens->uses[places[place - 1]].count < count; place--)
			places[place] = places[place - 1];
		places[place] = at;
	}
	list = PyList_New(0);
	for (Py_ssize_t at = 0; list && at < found; at++) {
		const struct use *use = &tokens->uses[places[at]];
		PyObject *pair = Py_BuildValue("OI", use->frame, use->count);

		if (!pair || PyList_Append(list, pair))
			Py_CLEAR(list);
		Py_XDECREF(pair);
	}
	PyMem_Free(places);
	return list;
}

struct kind {
	PyObject *fields[KIND_FIELDS]; /* borrowed from a counted frame */
	PyObject *frames;
};

/* Returns the list of a kind in a dictionary, after adding it if it is new; NULL on failure. */
static PyObject *find_group(PyObject *groups, PyObject *const *fields)
{
	PyObject *key = Py_BuildValue("NOOOO", PyLong_FromVoidPtr(fields[0]), fields[1], fields[2],
				      fields[3], fields[4]);
	PyObject *frames = key ? PyDict_GetItemWithError(groups, key) : NULL;

	Py_XINCREF(frames);
	if (key && !frames && !PyErr_Occurred()) {
		frames = PyList_New(0);
		if (frames && PyDict_SetItem(groups, key, frames))
			Py_CLEAR(frames);
	}
	if (frames && check_type("group", PyList_Check(frames), "list"))
		Py_CLEAR(frames);
	Py_XDECREF(key);
	return frames;
}

static PyObject *group(PyObject *self, PyObject *groups)
{
	const struct frame_tokens *tokens = (struct frame_tokens *)self;
	struct kind *kinds;
	PyObject *done = NULL;

	if (check_type("groups", PyDict_Check(groups), "dict"))
		return NULL;
	kinds = PyMem_Calloc(RECENT_KINDS, sizeof(*kinds));
	if (!kinds)
		return PyErr_NoMemory();
	for (uint32_t at = 0; at < tokens->used; at++) {
		PyObject *frame = tokens->uses[at].frame, *fields[KIND_FIELDS];
		struct kind *kind;
		uint64_t key;

		if (!tokens->uses[at].count)
			continue;
		if (check_type("frame", PyTuple_Check(frame) && PyTuple_Size(frame) == FRAME_FIELDS,
			       "tuple of 8 fields"))
			goto out;
		fields[0] = PyTuple_GetItem(frame, 0);
		key = (uintptr_t)fields[0];
		for (int field = 1; field < KIND_FIELDS; field++) {
			fields[field] = PyTuple_GetItem(frame, FIRST_KIND_FIELD + field - 1);
			key = key * 31 + (uintptr_t)fields[field];
		}
		kind = &kinds[hash(key) % RECENT_KINDS];
		if (!kind->frames || memcmp(kind->fields, fields, sizeof(fields))) {
			Py_XDECREF(kind->frames);
			memcpy(kind->fields, fields, sizeof(fields));
			kind->frames = find_group(groups, fields);
		}
		if (!kind->frames || PyList_Append(kind->frames, frame))
			goto out;
	}
	done = Py_NewRef(Py_None);
out:
	for (int at = 0; at < RECENT_KINDS; at++)
		Py_XDECREF(kinds[at].frames);
	PyMem_Free(kinds);
	return done;
}

static PyObject *get(PyObject *self, PyObject *frame)
{
	const struct use *use = look_up((struct frame_tokens *)self, frame);

	if (!use || !use->token_bytes)
		Py_RETURN_NONE;
	return PyBytes_FromStringAndSize(use->token, use->token_bytes);
}

int has_token(PyObject *self, PyObject *frame)
{
	const struct use *use = look_up((struct frame_tokens *)self, frame);

	return use && use->token_bytes;
}

/* Stores a frame's token; NULL, or anything but 1 to 11 bytes, is an error. */
int store_token(PyObject *self, PyObject *frame, PyObject *token)
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

/* Writes a frame's token, and returns its size; -1 on failure, or if there is none and no `missing`. */
static Py_ssize_t write_token(PyObject *self, PyObject *frame, PyObject *missing, char *to)
{
	const struct use *use = look_up((struct frame_tokens *)self, frame);

	if (!use || !use->token_bytes) {
		PyObject *token = missing ?
			PyObject_CallFunctionObjArgs(missing, frame, NULL) : NULL;

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

/* Returns the number of frames in sides; -1, without an error unless one occurred, if a side is
 * incomplete or its frames are no tuple. */
static Py_ssize_t count_all(PyObject *sides)
{
	Py_ssize_t size = 0;

	for (Py_ssize_t at = 0; at < PyTuple_Size(sides); at++) {
		PyObject *side = PyTuple_GetItem(sides, at), *frames = side_frames(sides, at);

		if (!frames || (PyTuple_Size(side) > SIDE_STATUS &&
				PyObject_IsTrue(PyTuple_GetItem(side, SIDE_STATUS))))
			return -1;
		size += PyTuple_Size(frames);
	}
	return size;
}

/* Returns the tokens of frames, separated; None if they are left to the caller; NULL on failure. */
PyObject *join_sides(PyObject *self, PyObject *sides, const char *separator,
		     Py_ssize_t separator_bytes, PyObject *missing)
{
	char buffer[BUFFER_BYTES], *bytes = buffer;
	Py_ssize_t size = count_all(sides), end = 0;
	PyObject *joined = NULL;

	if (size < 0)
		return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
	if (size > BUFFER_BYTES / (MAX_TOKEN_BYTES + separator_bytes)) {
		bytes = size < PY_SSIZE_T_MAX / (MAX_TOKEN_BYTES + separator_bytes) ?
			PyMem_Malloc(size * (MAX_TOKEN_BYTES + separator_bytes)) : NULL;
		if (!bytes)
			return PyErr_NoMemory();
	}
	for (Py_ssize_t side = 0; side < PyTuple_Size(sides); side++) {
		PyObject *frames = side_frames(sides, side);

		for (Py_ssize_t at = 0; at < PyTuple_Size(frames); at++) {
			Py_ssize_t written;

			if (end) {
				memcpy(bytes + end, separator, separator_bytes);
				end += separator_bytes;
			}
			written = write_token(self, PyTuple_GetItem(frames, at), missing,
					      bytes + end);
			if (written < 0) {
				joined = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
				goto out;
			}
			end += written;
		}
	}
	joined = PyBytes_FromStringAndSize(bytes, end);
out:
	if (bytes != buffer)
		PyMem_Free(bytes);
	return joined;
}

static PyObject *join(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
	char *separator;
	Py_ssize_t separator_bytes;

	if (check_count("join", count, 3) ||
	    check_type("sides", PyTuple_Check(arguments[0]), "tuple") ||
	    PyBytes_AsStringAndSize(arguments[1], &separator, &separator_bytes))
		return NULL;
	return join_sides(self, arguments[0], separator, separator_bytes, arguments[2]);
}

static PyMethodDef methods[] = {
	{"add_locations", FAST(add_locations), add_locations_text},
	{"add_samples", FAST(add_samples), add_samples_text},
	{"count", count_frames, METH_O,
	 "Counts one more use of each frame in a stack's sides; returns False if it leaves any."},
	{"most_used", most_used, METH_O, "Returns the most used frames and their uses."},
	{"group", group, METH_O, "Adds each counted frame to the list of its kind."},
	{"get", get, METH_O, "Returns the token of a frame; None if it has none."},
	{"join", FAST(join),
	 "Returns the tokens of the frames in a stack's sides, separated; None if it leaves the stack."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "Counts the uses of frames, and maps frames to tokens."},
	{Py_tp_dealloc, deallocate},
	{Py_tp_methods, methods},
	{Py_mp_ass_subscript, store_token},
	{0, NULL},
};

PyType_Spec frame_tokens_spec = {
	"otel_kprofiler.speedups.FrameTokens",
	sizeof(struct frame_tokens),
	0,
	Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	slots,
};
