"""Span links: each thread publishes its current span where the sampler copies it from.

The current span changes when a thread attaches or detaches an OpenTelemetry context, and when it
enters another ``contextvars.Context``: a step of an asyncio task, a work item of an executor.
The former are hooked at OpenTelemetry's runtime context, the latter at ``asyncio.Handle`` and
``concurrent.futures``. Whoever else enters a context (another event loop implementation, a
library with threads of its own, ``Context.run`` by hand) does not tell. So a slot names the
context that its span is current in, and the sampler compares it with the one that the thread is
in at the interrupt: no link rather than a wrong one.

This and :mod:`.thread_slot` are the only ones to reach into private parts of OpenTelemetry's API
and of Python.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executor
import contextvars
import functools
import logging
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context.context import Context, _RuntimeContext
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.trace.propagation import _SPAN_KEY

from otel_kprofiler.bpf import SLOT_BYTES, SpanSlot, SpanSlots
from otel_kprofiler.sdk.thread_slot import (
    ThreadSlot,
    find_context_offset,
    get_thread_state,
    make_publish,
)

_log = logging.getLogger(__name__)

_Enter = Callable[[contextvars.Context], ThreadSlot | None]
_Leave = Callable[[ThreadSlot], None]


class _Tenant:
    """Ends with the thread that it is local to, and gives its slot back."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def __del__(self) -> None:
        self._ended()


class SpanLinks:
    """Publishes the current span of every thread, from :meth:`start` to :meth:`stop`.

    There is one at a time in a process; its methods belong to one thread.

    Args:
        slots: where to publish.
        unsampled: link spans, too, that are not sampled and so are not exported.

    Attributes:
        possible: whether this interpreter lets the current context be known.
        threads: number of threads that have a slot.
        without_slot: threads that found no free slot; their samples have no links.
        failures: spans that could not be read (such as those of a foreign API).
        unhooked_loops: types of event loops that do not tell when they switch tasks; a sample of
            theirs is linked only if its task was the last to change the span.
    """

    def __init__(self, slots: SpanSlots, *, unsampled: bool = False) -> None:
        self._slots: SpanSlots | None = slots
        self._own: dict[int, ThreadSlot] = {}  # by the thread's identifier
        self._publish = make_publish(self._own, unsampled=unsampled, failed=self._count_failure)
        self._offset = find_context_offset()
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []
        self.possible = self._offset is not None
        self.threads = self.without_slot = self.failures = 0
        self.unhooked_loops: set[str] = set()

    def start(self) -> None:
        """Hook in, and publish what is current in this thread."""
        if not self.possible:
            return
        runtime = otel_context._RUNTIME_CONTEXT  # noqa: SLF001
        self._replace(otel_context, "_RUNTIME_CONTEXT", self._make_runtime_context(runtime))
        variable = getattr(runtime, "_current_context", None)
        if isinstance(variable, ContextVar):
            enter, leave = self._make_enter_and_leave(variable)
            step = _make_step(asyncio.Handle._run, enter, leave)  # noqa: SLF001
            self._replace(asyncio.Handle, "_run", step)
            work = _make_work(executor._WorkItem.run, enter, leave)  # noqa: SLF001
            self._replace(executor._WorkItem, "run", work)  # noqa: SLF001
        _active.append(self)
        self._publish_first(runtime.get_current())

    def stop(self) -> None:
        """Unhook. What is in the slots stays there: the sampler must have stopped."""
        self._slots = None
        self._own.clear()
        while self._undo:
            self._undo.pop()()
        if self in _active:
            _active.remove(self)

    def before_fork(self) -> None:
        """A child shares the slots: its only thread must not write them."""
        self._local.held = self._own.pop(threading.get_ident(), None)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        held = self._local.__dict__.pop("held", None)
        if held is not None:
            self._own[threading.get_ident()] = held

    def _make_runtime_context(self, runtime: Any) -> _RuntimeContext:
        """A runtime context over the given one that publishes what becomes current."""
        if type(runtime) is ContextVarsRuntimeContext:
            variable = runtime._current_context  # noqa: SLF001
            enter, leave, current = variable.set, variable.reset, variable.get
        else:
            enter, leave, current = runtime.attach, runtime.detach, runtime.get_current
        publish, publish_first = self._publish, self._publish_first

        class Publishing(type(runtime)):  # type: ignore[misc]
            """Methods of a class, over closures: the fastest way that there is to here."""

            def __init__(self) -> None:
                self.__dict__.update(vars(runtime))

            def attach(self, context: Context) -> Any:
                token = enter(context)
                if not publish(context):
                    publish_first(context)
                return token

            def detach(self, token: Any) -> None:
                leave(token)
                publish(current())

        return Publishing()

    def _make_enter_and_leave(self, variable: ContextVar[Context]) -> tuple[_Enter, _Leave]:
        own, publish, publish_first = self._own, self._publish, self._publish_first

        def enter(entered: contextvars.Context) -> ThreadSlot | None:
            context = entered.get(variable)
            slot = own.get(threading.get_ident())
            if slot is None and context:
                slot = publish_first(context)
            if slot is not None:
                slot.enter(entered)
                if context:
                    publish(context, slot)
            return slot

        def leave(slot: ThreadSlot) -> None:
            slot.leave()
            context = variable.get()
            if context:
                publish(context)

        return enter, leave

    def _publish_first(self, context: Context) -> ThreadSlot | None:
        """Give this thread a slot if it is in a span; without a free one, idle memory."""
        slots = self._slots
        if slots is None or self._offset is None or _SPAN_KEY not in context:
            return None
        if hasattr(self._local, "held"):  # it forks
            return None
        tid = threading.get_native_id()
        try:
            slot = slots.register(tid)
        except OSError as error:
            _log.warning("no span links for thread %d: %s", tid, error)
            slot = None
        if slot is None:
            self.without_slot += 1
            slot = SpanSlot(memoryview(bytearray(SLOT_BYTES)).cast("Q"))
        else:
            self.threads += 1
        ident = threading.get_ident()
        self._local.tenant = _Tenant(lambda: self._release(ident, tid))
        own = self._own[ident] = ThreadSlot(
            slot, get_thread_state() + self._offset, self._note_loop
        )
        self._publish(context)
        return own

    def _release(self, ident: int, tid: int) -> None:
        self._own.pop(ident, None)
        slots = self._slots
        if slots is not None and slots.release(tid):
            self.threads -= 1

    def _note_loop(self) -> None:
        loop = asyncio._get_running_loop()  # noqa: SLF001 - it answers None outside of loops
        if loop is not None and not isinstance(loop, asyncio.BaseEventLoop):
            kind = type(loop)
            self.unhooked_loops.add(f"{kind.__module__}.{kind.__qualname__}")

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


def _make_step(run: Callable[[Any], None], enter: _Enter, leave: _Leave) -> Callable[[Any], None]:
    """``asyncio.Handle._run``: one step of a task, or one callback."""

    def _run(self: Any) -> None:
        slot = enter(self._context)
        if slot is None:
            run(self)
            return
        try:
            run(self)
        finally:
            leave(slot)

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
        slot = enter(context) if isinstance(context, contextvars.Context) else None
        try:
            run(self, *arguments)
        finally:
            if slot is not None:
                leave(slot)

    return work


_active: list[SpanLinks] = []


def _before_fork() -> None:
    for links in _active:
        links.before_fork()


def _after_fork_in_parent() -> None:
    for links in _active:
        links.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for links in tuple(_active):
        links.stop()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
