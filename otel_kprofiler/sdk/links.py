"""Span links: each thread says which span is current in it, where the sampler reads it.

The current span changes when a thread attaches or detaches an OpenTelemetry context, and when it
enters another ``contextvars.Context``: a step of an asyncio task, a work item of an executor.
The former are hooked at OpenTelemetry's runtime context, the latter at ``asyncio.Handle`` and
``concurrent.futures``. Whoever else enters a context (another event loop implementation, a
library with threads of its own, ``Context.run`` by hand) does not tell. So a thread names the
context that its span is current in, too, and the sampler compares it with the one that the thread
is in at the interrupt: no link rather than a wrong one.

This, :mod:`.thread_slot` and :mod:`.other_threads` are the only ones to reach into private parts of
OpenTelemetry's API and of Python.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executor
import contextlib
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context.context import Context, _RuntimeContext
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler import forks
from otel_kprofiler.bpf import SpanSlots
from otel_kprofiler.forks import ForkAware, ForkStep
from otel_kprofiler.sdk.other_threads import (
    OtherThread,
    is_changing_context,
    read_other_threads,
)
from otel_kprofiler.sdk.thread_slot import (
    ThreadSlot,
    find_context_offset,
    find_said_offset,
    get_thread_state,
    get_token,
    make_publish,
)

_log = logging.getLogger(__name__)

_Before = tuple[ThreadSlot, object, object]
_Enter = Callable[[contextvars.Context], _Before | None]
_Leave = Callable[[_Before], None]


class _Tenant:
    """Ends with the thread that it is local to, and gives its slot back.

    In a forked child, the interpreter ends the tenants of all threads that are not there, before
    any hook runs: their slots belong to threads of the parent, which live on.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._ended()


class SpanLinks(ForkAware):
    """Tells the current span of every thread, from :meth:`start` to :meth:`stop`.

    There is one at a time in a process; its methods belong to one thread, except :meth:`look`.

    Args:
        slots: where the sampler is told; None if the interpreter's objects cannot be read.

    Attributes:
        possible: whether spans and the current context can be known: by this interpreter, and by
            OpenTelemetry's own runtime context.
        problem: why there are no links, or not of all threads; empty if there is no reason.
        threads: number of threads that have a slot.
        without_slot: threads that found no free slot; their samples have no links.
        failures: spans that could not be read (such as those of a foreign API).
        unhooked_loops: types of event loops that do not tell when they switch tasks; a sample of
            theirs is linked only if its task was the last to change the span.
    """

    def __init__(self, slots: SpanSlots | None) -> None:
        self._slots = slots
        self._own: dict[int, ThreadSlot] = {}  # by the thread's identifier
        self._adopted: dict[
            int, int
        ] = {}  # likewise: ids of threads that do not know of their slot
        self._publish = make_publish(self._own, look=self._look_around, failed=self._count_failure)
        said_at, context_at = find_said_offset(), find_context_offset()
        self._offsets: tuple[int, int] | None = None
        if slots is not None and said_at is not None and context_at is not None:
            self._offsets = said_at, context_at
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []
        self.possible = self._offsets is not None
        self.problem = ""
        self.threads = self.without_slot = self.failures = 0
        self.unhooked_loops: set[str] = set()

    def start(self) -> None:
        """Hook in, and tell what is current in this thread."""
        runtime: Any = otel_context._RUNTIME_CONTEXT  # noqa: SLF001
        self.problem = self._find_problem(type(runtime))
        if self.problem:
            _log.warning("%s: %s", "span links" if self.possible else "no span links", self.problem)
        if not self.possible:
            return
        self._replace(otel_context, "_RUNTIME_CONTEXT", self._make_runtime_context(runtime))
        variable = runtime._current_context  # noqa: SLF001
        enter, leave = self._make_enter_and_leave(variable)
        step = _make_step(asyncio.Handle._run, enter, leave)  # noqa: SLF001
        self._replace(asyncio.Handle, "_run", step)
        work = _make_work(executor._WorkItem.run, enter, leave)  # noqa: SLF001
        self._replace(executor._WorkItem, "run", work)  # noqa: SLF001
        forks.register(ForkStep.UNHOOK, self)
        self._publish_first(runtime.get_current(), get_token())
        for thread in read_other_threads():
            self._adopt(thread, variable)

    def stop(self) -> None:
        """Unhook; the sampler must have stopped."""
        self._slots = None
        self._own.clear()
        self._adopted.clear()
        while self._undo:
            self._undo.pop()()
        forks.unregister(self)

    def after_fork_in_child(self) -> None:
        """Unhook: the map of slots is the parent's."""
        self.stop()

    def look(self) -> None:
        """Have each thread look, once, which event loop it runs in; from any thread."""
        for slot in tuple(self._own.values()):
            slot.look = True
        for ident, tid in tuple(self._adopted.items()):
            if not os.path.exists(f"/proc/self/task/{tid}"):
                self._adopted.pop(ident, None)
                self._release(ident, tid)

    def as_dict(self) -> dict[str, object]:
        """The attributes as plain values."""
        return {
            "possible": self.possible,
            "problem": self.problem,
            "threads": self.threads,
            "without_slot": self.without_slot,
            "failures": self.failures,
            "unhooked_event_loops": sorted(self.unhooked_loops),
        }

    def _find_problem(self, runtime: type) -> str:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self.possible = False
            return "this Python runs without its global lock, so threads change what is being read"
        if not self.possible:
            return "this interpreter keeps spans and contexts in another way than CPython"
        if runtime is not ContextVarsRuntimeContext:
            self.possible = False
            return f"the runtime context is {_name(runtime)}, not OpenTelemetry's own"
        if getattr(sys.flags, "thread_inherit_context", False):
            return (
                "a thread that inherits the context of its creator (thread_inherit_context) has "
                "links from its own first change of span on"
            )
        return ""

    def _make_runtime_context(self, runtime: ContextVarsRuntimeContext) -> _RuntimeContext:
        """A runtime context in place of the given one that publishes what becomes current."""
        publish, publish_first = self._publish, self._publish_first
        variable = runtime._current_context  # noqa: SLF001
        enter, leave, current = variable.set, variable.reset, variable.get

        class Publishing(ContextVarsRuntimeContext):
            """Methods of a class, over closures: the fastest way that there is to here."""

            def __init__(self) -> None:
                self.__dict__.update(vars(runtime))

            def attach(self, context: Context) -> Any:
                token = enter(context)
                if not publish(context, token):
                    publish_first(context, token)
                return token

            def detach(self, token: Any) -> None:
                leave(token)
                publish(current(), token)

        return Publishing()

    def _make_enter_and_leave(self, variable: ContextVar[Context]) -> tuple[_Enter, _Leave]:
        find, publish, publish_first = self._own.get, self._publish, self._publish_first

        def enter(entered: contextvars.Context) -> _Before | None:
            context = entered.get(variable)
            slot = find(threading.get_ident())
            if slot is None:
                slot = publish_first(context, entered) if context else None
                return None if slot is None else (slot, None, None)
            before = slot, slot.owner, slot.span_context
            if context:
                publish(context, entered)
            else:
                slot.span_context = None
            return before

        def leave(before: _Before) -> None:
            slot, owner, span_context = before
            slot.span_context = None
            slot.owner = owner
            slot.span_context = span_context

        return enter, leave

    def _publish_first(self, context: Context, owner: object) -> ThreadSlot | None:
        """Give this thread a slot if it is in a span; one that nobody reads if none is free."""
        if self._slots is None or _SPAN_KEY not in context:
            return None
        tid, ident = threading.get_native_id(), threading.get_ident()
        new = ThreadSlot()
        slot = self._own.setdefault(ident, new)
        if slot is new:  # else it was adopted just now
            self._register(slot, tid, get_thread_state())
            self._local.tenant = _Tenant(lambda: self._release(ident, tid))
        self._publish(context, owner)
        return slot

    def _register(self, slot: ThreadSlot, tid: int, thread_state: int) -> None:
        slots, offsets = self._slots, self._offsets
        if slots is None or offsets is None:
            return
        try:
            registered = slots.register(tid, id(slot) + offsets[0], thread_state + offsets[1])
        except OSError as error:
            _log.warning("no span links for thread %d: %s", tid, error)
            registered = False
        if registered:
            self.threads += 1
        else:
            self.without_slot += 1

    def _adopt(self, thread: OtherThread, variable: ContextVar[Context]) -> None:
        """Give another thread a slot with the span that it has been in since before the hooks.

        From the moment that it has the slot, it tells of its changes there. So the span that is
        read then is its own as long as it has told of none; and what began to change the span
        before the hooks is seen in its frames.
        """
        ident, tid = thread.ident, thread.tid
        if _SPAN_KEY not in (thread.context.get(variable) or ()):
            return
        slot = ThreadSlot()
        self._adopted[ident] = tid
        if self._own.setdefault(ident, slot) is not slot:
            self._adopted.pop(ident, None)
            return
        self._register(slot, tid, thread.state)
        if self._own.get(ident) is not slot:  # it has ended meanwhile
            self._release(ident, tid)
            return
        if is_changing_context(ident):
            return
        try:
            span: Any = (thread.context.get(variable) or Context()).get(_SPAN_KEY)
            span_context = None if span is None else span.get_span_context()
        except Exception:  # noqa: BLE001 - counted; the start of the profiler must not fail
            self._count_failure()
            return
        # The interpreter's lock does not change hands between these lines.
        if slot.owner is None:
            slot.owner = thread.context
            slot.span_context = span_context

    def _release(self, ident: int, tid: int) -> None:
        slots = self._slots
        if slots is not None and slots.release(tid):
            self.threads -= 1
        self._own.pop(ident, None)  # its memory may be somebody else's from now on

    def _look_around(self) -> None:
        """Called at a change of span in a thread with a slot, now and then."""
        self._note_loop()
        ident = threading.get_ident()
        adopted = self._adopted.pop(ident, None)
        if adopted is None:
            return
        if adopted != threading.get_native_id():  # it has ended; this one has its identifier
            self._release(ident, adopted)
        elif not hasattr(self._local, "tenant"):
            self._local.tenant = _Tenant(lambda: self._release(ident, adopted))

    def _note_loop(self) -> None:
        loop = _find_unhooked_loop()
        if loop and loop not in self.unhooked_loops:
            self.unhooked_loops.add(loop)
            _log.warning(
                "span links: %s does not tell when it switches tasks; a sample is linked only if "
                "its task was the last to change the span",
                loop,
            )

    def _count_failure(self) -> None:
        self.failures += 1

    def _replace(self, owner: Any, name: str, hook: Any) -> None:
        own = getattr(owner, name)
        setattr(owner, name, hook)

        def undo() -> None:
            # Else somebody has hooked in after us, and calls ours, which does no harm.
            if getattr(owner, name) is hook:
                setattr(owner, name, own)

        self._undo.append(undo)


def _find_unhooked_loop() -> str:
    """The event loop that runs in this thread, if it is neither asyncio's nor none."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - it answers None outside of loops
    if loop is not None:
        return "" if isinstance(loop, asyncio.BaseEventLoop) else _name(type(loop))
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):  # outside of its loops
            trio.lowlevel.current_trio_token()
            return "trio"
    return ""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _make_step(run: Callable[[Any], None], enter: _Enter, leave: _Leave) -> Callable[[Any], None]:
    """``asyncio.Handle._run``: one step of a task, or one callback."""

    def _run(self: Any) -> None:
        before = enter(self._context)
        if before is None:
            run(self)
            return
        try:
            run(self)
        finally:
            leave(before)

    return _run


def _make_work(run: Callable[..., None], enter: _Enter, leave: _Leave) -> Callable[..., None]:
    """``concurrent.futures.thread._WorkItem.run``: what an executor does for someone.

    ``asyncio.to_thread`` and others hand over the context as ``partial(context.run, …)``.
    """

    def work(self: Any, *arguments: Any) -> None:
        # From 3.14 on, an item has a tuple whose first entry is the function.
        function = getattr(self, "fn", None) or getattr(self, "task", (None,))[0]
        if isinstance(function, functools.partial):
            function = function.func
        context = getattr(function, "__self__", None)
        before = enter(context) if isinstance(context, contextvars.Context) else None
        try:
            run(self, *arguments)
        finally:
            if before is not None:
                leave(before)

    return work
