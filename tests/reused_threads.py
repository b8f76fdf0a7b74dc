"""A service with short-lived threads that reuse the same thread id under different names.

``python -m tests.reused_threads FILE`` writes the log and exits when its input ends. Before
starting a thread, the program sets the last pid (proc_sys_kernel(5)), which requires root.
"""

import json
import sys
import threading
import time
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import thread_context

NAMES = "reused-first", "reused-second"
WITH_SPANS = NAMES[0]
_LAST = Path("/proc/sys/kernel/ns_last_pid")
provider = TracerProvider()
trace.set_tracer_provider(provider)
tracer = provider.get_tracer("reused")
lives = []


def work():
    end = time.monotonic() + 0.002
    while time.monotonic() < end:
        sum(range(50))


def live(name):
    """Works, waits and works again, and records the times.

    Only the thread ``WITH_SPANS`` has a span.
    """
    Path("/proc/thread-self/comm").write_text(name)
    start, link = time.clock_gettime_ns(time.CLOCK_BOOTTIME), None
    if name == WITH_SPANS:
        with tracer.start_as_current_span(name) as span:
            context = span.get_span_context()
            link = f"{context.trace_id:032x}{context.span_id:016x}"
            start = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            work()
            time.sleep(0.002)
            work()
            end = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    else:
        work()
        time.sleep(0.002)
        work()
        end = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    lives.append((threading.get_native_id(), start, end, name, link))


def main():
    Path("/proc/self/comm").write_text(NAMES[1])
    thread_context.start({"service.name": "reused"})
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
    tid = 0
    while not ended.is_set():
        for name in NAMES:
            if tid:
                _LAST.write_text(str(tid - 1))
            thread = threading.Thread(target=live, args=(name,))
            thread.start()
            tid = tid or thread.native_id
            thread.join()
            while Path(f"/proc/self/task/{thread.native_id}").exists():
                time.sleep(0.0002)
    Path(sys.argv[1]).write_text(json.dumps(lives))


if __name__ == "__main__":
    main()
