// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds the interrupted thread's CPython state in the interpreter's list of thread states.
 *
 * Thread-local storage contains the state only while the thread holds the GIL, and a thread in the
 * kernel rarely holds the GIL. Other threads may change the list during the search, so a state is
 * used only if it belongs to this thread and is in the list.
 *
 * With subinterpreters, a thread may have a thread state, with frames of its own, in each of
 * several interpreters. From 3.13 on, a bit marks the state that the thread used last, with or
 * without the GIL. In older versions, a thread may use a state that has another thread's id, so
 * only the states of the main interpreter, the last in the list of interpreters, are examined.
 */
#pragma once

#include "python_types.bpf.h"

enum thread_status {
	IS_THREADS = 8, /* bound_gilstate in PyThreadState._status (Include/cpython/pystate.h) */
};

INLINE u64 thread_word(const struct python_work *w, u64 at)
{
	BOUND(at, THREAD_BYTES - 8);
	return *(const u64 *)((const u8 *)w->thread_head + at);
}

/* Copies the beginning of a thread state; returns 0 on success. */
INLINE int read_thread(struct python_work *w, const struct python_layout *l, u64 thread)
{
	u64 bytes = l->thread_bytes;

	BOUND(bytes, THREAD_BYTES - 1);
	return bpf_probe_read_user(w->thread_head, bytes, (void *)thread);
}

/* Returns whether the copied state is the one that this thread uses or used last. */
INLINE int is_own(const struct python_work *w, const struct python_layout *l)
{
	return thread_word(w, l->thread_native) == w->native &&
	       thread_word(w, l->thread_interpreter) == w->interpreter &&
	       (!w->several || thread_word(w, l->thread_status) & IS_THREADS);
}

/* Finds the current frame in the copied thread state; returns 0 on success. */
INLINE int read_current_frame(struct python_work *w, const struct python_layout *l)
{
	w->frame = thread_word(w, l->thread_frame);
	return l->flags & PYTHON_CFRAME && READ_USER(w->frame, w->frame + l->cframe_frame);
}

/* Returns whether a thread state is still in the list, and still belongs to this thread. */
INLINE int is_current(struct python_work *w, const struct python_layout *l, u64 thread)
{
	u64 previous, link = 0;

	if (read_thread(w, l, thread) || !is_own(w, l))
		return 0;
	previous = thread_word(w, l->thread_previous);
	return !READ_USER(link, previous ? previous + l->thread_next :
					   w->interpreter + l->interpreter_threads) &&
	       link == thread;
}

/* Returns the thread's id in its innermost pid namespace; 0 if it cannot be read. */
INLINE u32 innermost_tid(const struct python_config *c)
{
	u64 task = bpf_get_current_task(), pid = 0;
	u32 level = 0, tid = 0;

	if (READ_KERNEL(pid, task + c->task_pid) || READ_KERNEL(level, pid + c->pid_level) ||
	    READ_KERNEL(tid, pid + c->pid_numbers + level * c->number_bytes))
		return 0;
	return tid;
}

/*
 * Walks the list to the interpreter at the given address, or to the last interpreter if the address
 * is 0. Returns 0 on success. If the address is not in the list, the interpreter may have been
 * freed.
 */
GLOBAL int go_to_interpreter(u64 wanted)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;
	u64 next;

	if (!w)
		return 1;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l)
		return 1;
#pragma clang loop unroll(disable)
	for (u32 i = 0; i < MAX_PYTHON_INTERPRETERS; i++) {
		if (w->interpreter == wanted)
			return 0;
		if (READ_USER(next, w->interpreter + l->interpreter_next))
			return 1;
		if (!next)
			return wanted != 0;
		w->interpreter = next;
	}
	return 1;
}

/* Advances to the next interpreter with threads; returns 0 on success, 1 if there is none. */
INLINE int next_interpreter(struct python_work *w, const struct python_layout *l)
{
	u64 next;

	if (!w->several)
		return 1;
	if (READ_USER(next, w->interpreter + l->interpreter_next) ||
	    (next && READ_USER(w->next_thread, next + l->interpreter_threads)))
		w->next_thread = -1; /* not all threads were examined */
	w->interpreter = next;
	return w->next_thread == -1ULL || !next;
}

/*
 * Examines one thread in the list; returns whether the search is over. In 3.11, a state that this
 * thread creates for another thread has this thread's id, but no frame. If there are several
 * interpreters, searches all of them. If two thread states both appear to be the most recently
 * used, uses neither.
 */
GLOBAL int try_thread(void)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;

	if (!w)
		return 1;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l)
		return 1;
	if (!w->next_thread)
		return next_interpreter(w, l);
	if (read_thread(w, l, w->next_thread))
		return 1;
	if (is_own(w, l)) {
		if (w->several && w->thread)
			return 1;
		w->thread = w->next_thread;
		if (!w->several && !read_current_frame(w, l) && w->frame)
			return 1;
	}
	w->next_thread = thread_word(w, l->thread_next);
	return 0;
}

/* Searches the list, which begins with the newest thread; returns one of enum python_outcomes. */
INLINE int search_thread(struct python_work *w, const struct python_layout *l)
{
	u32 tried;

	if (READ_USER(w->next_thread, w->interpreter + l->interpreter_threads))
		return PYTHON_UNREADABLE;
	w->thread = w->tried = 0;
#pragma clang loop unroll(disable)
	for (u32 i = 1; i <= MAX_PYTHON_THREADS && !try_thread(); i++)
		w->tried = i;
	tried = *(volatile u32 *)&w->tried;
	/* the search is incomplete, or two states match */
	if (w->several && (w->next_thread || tried == MAX_PYTHON_THREADS)) {
		w->thread = 0;
		return PYTHON_INTERPRETERS;
	}
	w->found.image = w->image;
	w->found.time_ns = w->time_ns;
	w->found.address = w->thread;
	/* after a cheap search, "not found" is not cached: a new thread may soon run Python code */
	if (w->thread || tried > CHEAP_SEARCH)
		bpf_map_update_elem(&python_threads, &w->tid, &w->found, 0);
	if (!w->thread)
		return w->next_thread ? PYTHON_THREADS : PYTHON_NO_THREAD;
	return read_thread(w, l, w->thread) ? PYTHON_UNREADABLE : PYTHON_COMPLETE;
}

/* Like is_current, but for a thread state that may belong to any of several interpreters. */
INLINE int is_current_of_several(struct python_work *w, const struct python_layout *l, u64 thread)
{
	return !read_thread(w, l, thread) &&
	       !go_to_interpreter(thread_word(w, l->thread_interpreter)) &&
	       is_current(w, l, thread);
}

/*
 * Finds the PyThreadState of the interrupted thread. Stores the state's address in `thread`, which
 * is 0 on entry, and its first bytes in `thread_head`. Requires a registered process. Returns one
 * of enum python_outcomes.
 */
GLOBAL int find_python_thread(void)
{
	struct python_work *w = get_python_work();
	const struct python_layout *l;
	struct thread_state *known;
	u64 first, next, thread;
	u32 zero = 0;
	const struct python_config *c = LOOKUP(python_config, &zero);

	if (!w || !c)
		return PYTHON_UNREADABLE;
	l = LOOKUP(python_layouts, &w->layout);
	if (!l)
		return PYTHON_UNREADABLE;
	w->native = innermost_tid(c);
	if (!w->native ||
	    READ_USER(first, w->process.runtime_at + l->interpreters_head) ||
	    READ_USER(next, first + l->interpreter_next))
		return PYTHON_UNREADABLE;
	w->interpreter = first;
	w->several = next && l->thread_status;
	if (next && !w->several && go_to_interpreter(0))
		return PYTHON_INTERPRETERS;
	known = LOOKUP(python_threads, &w->tid);
	if (known && known->image == w->image) {
		thread = known->address;
		if (!thread && w->time_ns - known->time_ns < ASK_AGAIN_NS)
			return PYTHON_NO_THREAD;
		if (thread && (w->several ? is_current_of_several(w, l, thread) :
					    is_current(w, l, thread))) {
			w->thread = thread;
			return PYTHON_COMPLETE;
		}
		w->interpreter = w->several ? first : w->interpreter;
	}
	return search_thread(w, l);
}
