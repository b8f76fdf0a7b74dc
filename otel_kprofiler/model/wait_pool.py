"""Detects pool threads waiting for work, by the functions on their stacks."""

import re
from itertools import dropwhile, pairwise
from typing import Final

from otel_kprofiler.model.stack import PYTHON_SIDE, Line, Stack

_PYTHON_WAITS: Final = frozenset({
    ("Condition.wait", "threading.py"), ("Queue.get", "queue.py"),
})  # fmt: skip
_PYTHON_WORKERS: Final = frozenset({
    ("_worker", "concurrent/futures/thread.py"), ("worker", "multiprocessing/pool.py"),
})  # fmt: skip
"""Main functions of Python pool threads. A thread waits for work in its main function itself, or in
a function in ``_PYTHON_WAITS``."""

_PAIRS: Final = frozenset({
    # Go parks a thread that has no goroutine to run: runtime/proc.go.
    ("runtime.stopm", "runtime.findRunnable"), ("runtime.stopm", "runtime.findrunnable"),
    # libuv's thread pool, as in Node: src/threadpool.c.
    ("uv_cond_wait", "worker"),
    # HotSpot's compiler and VM threads: compileBroker.cpp, vmThread.cpp.
    ("CompileQueue::get", "CompileBroker::compiler_thread_loop"),
    ("VMThread::wait_for_operation", "VMThread::run"),
})  # fmt: skip
"""Pairs (waiting function, caller), each of which indicates a thread waiting for work."""

_JAVA: Final = re.compile(
    r"java[./]util[./]concurrent[./](?:ThreadPoolExecutor;?(?:\.|::)getTask"
    r"|ForkJoinPool;?(?:\.|::)awaitWork)\b"
)
"""Matches names of Java pool functions, in the forms that JIT maps and JVM profilers report."""


def is_idle_in_pool(stack: Stack) -> bool:
    """Returns whether a thread waiting on a futex is an idle pool thread."""
    frames = [frame for frame in stack.frames if frame.lines]
    python = [frame.lines[-1] for frame in frames if frame.side is PYTHON_SIDE]
    if python:
        main = next(dropwhile(lambda line: _is_one_of(line, _PYTHON_WAITS), python), None)
        return main is not None and _is_one_of(main, _PYTHON_WORKERS)
    names = [frame.function.partition("(")[0] for frame in frames]
    return not _PAIRS.isdisjoint(pairwise(names)) or any(map(_JAVA.search, names))


def _is_one_of(line: Line, functions: frozenset[tuple[str, str]]) -> bool:
    return any(
        line.function == name and f"/{line.file}".endswith(f"/{file}") for name, file in functions
    )
