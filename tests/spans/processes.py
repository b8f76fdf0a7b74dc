"""Child processes that sample themselves: multiprocessing and Celery workers."""

import contextlib
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from pathlib import Path

from opentelemetry import trace

from tests.spans.interpreter import TRACER, nested_spans, tasks
from tests.spans.observe import NOTHING, Outcome, Truth, compare, sampling


def in_child(outcomes, seconds, source):
    """Samples this process within the span inherited at fork, if any, and within new spans."""
    truth = Truth(source)
    inherited = trace.get_current_span()
    with sampling(source) as samples:
        truth.observe(inherited)
        nested_spans(truth, seconds / 2)
        tasks(truth, seconds / 2)
        truth.observe(inherited)
    outcomes.put(tuple(compare(samples, truth)))


def multiprocess(truth, seconds):
    """Samples children that are forked by a thread, spawned, or started by a fork server."""
    total = NOTHING
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        outcomes = context.Queue()
        with TRACER.start_as_current_span("parent") as parent:
            child = context.Process(target=in_child, args=(outcomes, seconds / 3, truth.source))
            starter = threading.Thread(target=child.start)
            if method == "fork":
                starter.start()
                starter.join()
            else:
                child.start()
            while True:
                truth.observe(parent)
                try:
                    total += Outcome(*outcomes.get(timeout=0.05))
                    break
                except queue.Empty:
                    assert child.is_alive() or not outcomes.empty(), method
            child.join()
    return total


def make_celery(truth):
    import celery

    app = celery.Celery("spans", broker="memory://", backend="cache+memory://")
    app.conf.update(
        worker_redirect_stdouts=False,
        task_ignore_result=True,
        broker_transport_options={"polling_interval": 0.005},
    )

    @app.task(name="work")
    def work():
        truth.observe(trace.INVALID_SPAN)
        with TRACER.start_as_current_span("task") as span:
            truth.observe(span)
            with TRACER.start_as_current_span("inner") as inner:
                truth.observe(inner)
            truth.observe(span)

    return app, work


def run_worker(app, work, seconds, pool):
    """Runs a Celery worker in the main thread while another thread sends tasks to the worker."""
    from celery import signals

    alone = dict.fromkeys(("without_mingle", "without_gossip", "without_heartbeat"), True)
    worker = app.Worker(pool=pool, concurrency=2, loglevel="ERROR", quiet=True, **alone)

    def send():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                work.delay()
            time.sleep(0.02)
        app.control.shutdown()

    sender = threading.Thread(target=send)

    def begin(**_):
        sender.start()

    # Tasks are not sent earlier, lest forked workers inherit an import lock held by the sender.
    signals.worker_ready.connect(begin)
    with contextlib.suppress(SystemExit):  # raised when the worker shuts down
        worker.start()
    sender.join()


def celery_threads(truth, seconds):
    run_worker(*make_celery(truth), seconds, "threads")


def celery_prefork(truth, seconds):
    """Celery with forked workers, which write their results to files."""
    from celery import signals

    directory = Path(tempfile.mkdtemp())
    running = {}

    @signals.worker_process_init.connect(weak=False)
    def begin(**_):
        truth.notes.clear()
        running["sampling"] = sampling(truth.source)
        running["samples"] = running["sampling"].__enter__()

    @signals.worker_process_shutdown.connect(weak=False)
    def end(**_):
        running.pop("sampling").__exit__(None, None, None)
        outcome = compare(running["samples"], truth)
        (directory / str(os.getpid())).write_text(" ".join(map(str, outcome)))

    run_worker(*make_celery(truth), seconds, "prefork")
    total = NOTHING
    for file in directory.iterdir():
        total += Outcome(*map(int, file.read_text().split()))
        file.unlink()
    directory.rmdir()
    return total


SCENARIOS = {
    "multiprocessing": multiprocess,
    "celery threads": celery_threads,
    "celery prefork": celery_prefork,
}
