"""Ground truth logged by a service under test: which span ran when, in which thread."""

import atexit
import os
import threading
import time

_steps = []


def step(span):
    """Logs that this span (None: no span) runs in this thread until the next call."""
    context = span.get_span_context() if span else None
    _steps.append((time.time_ns(), threading.get_native_id(), context))


@atexit.register
def _write():
    if not _steps:
        return  # gunicorn's master, which handles no requests
    with open(os.path.join(os.environ["STEP_LOG"], f"{os.getpid()}.txt"), "w") as file:
        for time_ns, tid, context in _steps:
            ids = f"{context.trace_id:032x} {context.span_id:016x}" if context else "- -"
            file.write(f"{time_ns} {tid} {ids}\n")
