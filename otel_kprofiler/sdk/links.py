"""Span links: each thread publishes its active span in a slot that the sampler reads.

This is for interpreters whose objects the sampler cannot follow (:mod:`.span_path`), and for span
classes that do not store their span context in the expected attribute, such as wrappers.

The active span changes when a thread attaches or detaches an OpenTelemetry context, which is
hooked in OpenTelemetry's runtime context, and when a thread enters another
``contextvars.Context`` for a step of an asyncio task or a work item of an executor, which is
hooked in ``asyncio.Handle`` and ``concurrent.futures``. Other code that enters a context (another
event loop, a library with its own threads, a direct ``Context.run``) goes unnoticed. Therefore a
thread also publishes the context its span is active in, and the mapping of that context's
variables, which each change replaces (asgiref's ``sync_to_async`` copies variables). The sampler
compares both with the thread's at the interrupt: if either differs, the sample gets no link rather
than a wrong link.

Only this module, :mod:`.thread_slot`, :mod:`.other_threads` and :mod:`.span_path` use private
parts of OpenTelemetry's API and of Python for this.
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
    find_owner_offset,
    get_thread_state,
    get_token,
    make_get_variables,
    make_publish,
)

_log = logging.getLogger(__name__)

_Before = tuple[ThreadSlot, object, object, object]
_Enter = Callable[[contextvars.Context], _Before | None]
_Leave = Callable[[_Before], None]


class _Tenant:
    """A thread-local object that releases its thread's slot when the thread ends.

    In a forked child, the interpreter deletes the tenants of all other threads before any hook
    runs. Their slots belong to threads of the parent and must not be released.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._ended()


class SpanLinks(ForkAware):
    """Publishes each thread's active span from :meth:`start` to :meth:`stop`.

    At most one instance per process may be started at a time. Call all methods except :meth:`look`
    from one thread.

    Args:
        slots: slots that the sampler reads; None if the sampler cannot read this interpreter's
            objects.

    Attributes:
        possible: whether this interpreter and runtime context support links.
        problem: why there are no links, or not for all threads; empty if there is no problem.
        threads: number of threads that have a slot.
        without_slot: number of threads that got no slot; their samples have no links.
        failures: spans that could not be read, such as those of a different API.
        unhooked_loops: types of event loops whose task switches go unnoticed; a sample in such a
            loop is linked only if its task was the last to change the span.
    """

    def __init__(self, slots: SpanSlots | None) -> None:
        self._slots = slots
        self._own: dict[int, ThreadSlot] = {}  # by thread identifier
        self._adopted: dict[int, int] = {}  # tids of threads without a tenant, by thread identifier
        get_variables = make_get_variables()
        self._get_variables = get_variables or (lambda _: None)
        self._publish = make_publish(
            self._own, self._get_variables, look=self._look_around, failed=self._count_failure
        )
        owner_at, context_at = find_owner_offset(), find_context_offset()
        self._offsets: tuple[int, int] | None = None
        if slots is not None and owner_at is not None and context_at is not None and get_variables:
            self._offsets = owner_at, context_at
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []
        self.possible = self._offsets is not None
        self.problem = ""
        self.threads = self.without_slot = self.failures = 0
        self.unhooked_loops: set[str] = set()

    def start(self) -> None:
        """Install the hooks and publish the active spans of all threads."""
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
        """Remove the hooks; the sampler must have stopped."""
        self._slots = None
        self._own.clear()
        self._adopted.clear()
        while self._undo:
            self._undo.pop()()
        forks.unregister(self)

    def after_fork_in_child(self) -> None:
        """Remove the hooks, because the slots belong to the parent."""
        self.stop()

    def look(self) -> None:
        """Ask threads to check their event loops; release slots of ended threads. Thread-safe."""
        for slot in tuple(self._own.values()):
            slot.look = True
        for ident, tid in tuple(self._adopted.items()):
            if not os.path.exists(f"/proc/self/task/{tid}"):
                self._adopted.pop(ident, None)
                self._release(ident, tid)

    def as_dict(self) -> dict[str, object]:
        """Returns the attributes as plain values."""
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
            return "this Python runs without the GIL, so threads change what is being read"
        if not self.possible:
            return "this interpreter's layout of spans and contexts differs from CPython's"
        if runtime is not ContextVarsRuntimeContext:
            self.possible = False
            return f"the runtime context is {_name(runtime)}, not OpenTelemetry's own"
        if getattr(sys.flags, "thread_inherit_context", False):
            return (
                "a thread that inherits its creator's context (thread_inherit_context) has links "
                "only after it first changes its span"
            )
        return ""

    def _make_runtime_context(self, runtime: ContextVarsRuntimeContext) -> _RuntimeContext:
        """Returns a replacement for the runtime context that publishes each new span."""
        publish, publish_first = self._publish, self._publish_first
        variable = runtime._current_context  # noqa: SLF001

        class Publishing(ContextVarsRuntimeContext):
            """Methods that access their values through closures, the fastest way."""

            def __init__(self) -> None:
                self.__dict__.update(vars(runtime))

            def attach(self, context: Context) -> Any:
                token = variable.set(context)
                if not publish(context, token):
                    publish_first(context, token)
                return token

            def detach(self, token: Any) -> None:
                variable.reset(token)
                publish(variable.get(), token)

        return Publishing()

    def _make_enter_and_leave(self, variable: ContextVar[Context]) -> tuple[_Enter, _Leave]:
        find, publish, publish_first = self._own.get, self._publish, self._publish_first

        def enter(entered: contextvars.Context) -> _Before | None:
            context = entered.get(variable)
            slot = find(threading.get_ident())
            if slot is None:
                slot = publish_first(context, entered) if context else None
                return None if slot is None else (slot, None, None, None)
            saved = slot, slot.owner, slot.span_context, slot.variables
            if context:
                publish(context, entered)
            else:
                slot.span_context = None
            return saved

        def leave(saved: _Before) -> None:
            slot, owner, span_context, variables = saved
            slot.span_context = None
            slot.owner = owner
            slot.variables = variables
            slot.span_context = span_context

        return enter, leave

    def _publish_first(self, context: Context, owner: object) -> ThreadSlot | None:
        """Give this thread a slot if it is in a span; if none is free, one the sampler ignores."""
        forks.catch_up()
        if self._slots is None or _SPAN_KEY not in context:
            return None
        tid, ident = threading.get_native_id(), threading.get_ident()
        new = ThreadSlot()
        slot = self._own.setdefault(ident, new)
        if slot is new:  # otherwise the thread has just been adopted
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
        """Give another thread a slot with the span it entered before the hooks were installed.

        Once it has the slot, the thread publishes its changes there, so the span read by another
        thread is valid only if the owner has published nothing since. The thread's frames reveal a
        change that started before the hooks were installed.
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
        if self._own.get(ident) is not slot:  # the thread has ended
            self._release(ident, tid)
            return
        if is_changing_context(ident):
            return
        # Read the mapping first: if the span changes afterwards, the thread has a different
        # mapping.
        variables = self._get_variables(thread.context)
        try:
            span: Any = (thread.context.get(variable) or Context()).get(_SPAN_KEY)
            span_context = None if span is None else span.get_span_context()
        except Exception:  # noqa: BLE001 - counted; the start of the profiler must not fail
            self._count_failure()
            return
        # The GIL is not released between these lines.
        if slot.owner is None:
            slot.owner = thread.context
            slot.variables = variables
            slot.span_context = span_context

    def _release(self, ident: int, tid: int) -> None:
        slots = self._slots
        if slots is not None and slots.release(tid):
            self.threads -= 1
        self._own.pop(ident, None)  # last, since its memory may be reused

    def _look_around(self) -> None:
        """Check the event loop of this thread and claim an adopted slot."""
        self._note_loop()
        ident = threading.get_ident()
        adopted = self._adopted.pop(ident, None)
        if adopted is None:
            return
        if adopted != threading.get_native_id():  # a new thread reuses the identifier
            self._release(ident, adopted)
        elif not hasattr(self._local, "tenant"):
            self._local.tenant = _Tenant(lambda: self._release(ident, adopted))

    def _note_loop(self) -> None:
        loop = _find_unhooked_loop()
        if loop and loop not in self.unhooked_loops:
            self.unhooked_loops.add(loop)
            _log.warning(
                "span links: task switches of %s go unnoticed; a sample is linked only if its "
                "task was the last to change the span",
                loop,
            )

    def _count_failure(self) -> None:
        self.failures += 1

    def _replace(self, owner: Any, name: str, hook: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, hook)

        def undo() -> None:
            # Otherwise, a hook installed later calls ours, which does no harm.
            if getattr(owner, name) is hook:
                setattr(owner, name, original)

        self._undo.append(undo)


def _find_unhooked_loop() -> str:
    """Returns the type of this thread's event loop if it is not asyncio's."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - returns None outside of loops
    if loop is not None:
        return "" if isinstance(loop, asyncio.BaseEventLoop) else _name(type(loop))
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):  # outside of trio's loops
            trio.lowlevel.current_trio_token()
            return "trio"
    return ""


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _make_step(run: Callable[[Any], None], enter: _Enter, leave: _Leave) -> Callable[[Any], None]:
    """Returns a replacement for ``asyncio.Handle._run``, which runs a task's step or a callback."""

    def _run(self: Any) -> None:
        saved = enter(self._context)
        if saved is None:
            run(self)
            return
        try:
            run(self)
        finally:
            leave(saved)

    return _run


def _make_work(run: Callable[..., None], enter: _Enter, leave: _Leave) -> Callable[..., None]:
    """Returns a replacement for ``_WorkItem.run`` of ``concurrent.futures.thread``.

    ``asyncio.to_thread``, for example, passes the context as ``partial(context.run, …)``.
    """

    def work(self: Any, *arguments: Any) -> None:
        # Since 3.14, a work item has a tuple whose first element is the function.
        function = getattr(self, "fn", None) or getattr(self, "task", (None,))[0]
        if isinstance(function, functools.partial):
            function = function.func
        context = getattr(function, "__self__", None)
        saved = enter(context) if isinstance(context, contextvars.Context) else None
        try:
            run(self, *arguments)
        finally:
            if saved is not None:
                leave(saved)

    return work
