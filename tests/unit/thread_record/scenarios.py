"""A service that switches spans in every possible way, and checks its thread records at each step.

Usage: scenarios.py NAME
"""
# ruff: noqa: ASYNC115, PLW0108, PLW0603, PT017, TRY301 - written like code of services

import asyncio
import concurrent.futures
import contextvars
import ctypes
import gc
import importlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider

from otel_kprofiler import labels, thread_context
from otel_kprofiler.errors import HostError
from otel_kprofiler.processes import read_process_context
from otel_kprofiler.sdk import thread_contexts
from tests.raw_forks import check_in_child
from tests.thread_record import read_record

tracer = TracerProvider().get_tracer("test")
may_miss = False
checked = linked = 0


def check():
    """Checks that the record identifies the current span, or is absent if `may_miss` is set."""
    global checked, linked
    span = trace.get_current_span().get_span_context()
    record = read_record()
    checked += 1
    linked += record is not None
    if record is None and (may_miss or not span.is_valid):
        return
    assert record is not None, "no record inside a span"
    assert record[:3] == (span.trace_id, span.span_id, span.trace_flags)


def nested():
    check()
    with tracer.start_as_current_span("outer"):
        check()
        with tracer.start_as_current_span("inner"):
            check()
        check()
        try:
            with tracer.start_as_current_span("failing"):
                check()
                raise ValueError
        except ValueError:
            check()
        with trace.use_span(trace.INVALID_SPAN):
            check()
        check()
    check()


def threads():
    def work():
        for _ in range(200):
            nested()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
        with tracer.start_as_current_span("parent"):
            pool.submit(contextvars.copy_context().run, nested).result()
        pool.submit(check).result()


def contexts():
    with tracer.start_as_current_span("inside"):
        inside = contextvars.copy_context()
    check()
    inside.run(check)
    check()
    with tracer.start_as_current_span("outside"):
        contextvars.Context().run(check)
        check()
        inside.run(nested)
        check()
        try:
            inside.run(lambda: inside.run(check))
        except RuntimeError as error:
            assert "already entered" in str(error)
        check()
        try:
            inside.run(int, "x")
        except ValueError:
            check()
    for wrong in (lambda: inside.run(), lambda: context._RUNTIME_CONTEXT._current_context.reset(1)):
        try:
            wrong()
        except TypeError:
            check()
        else:
            raise AssertionError("no TypeError")
    # asgiref copies variables between contexts without calling attach
    variable = context._RUNTIME_CONTEXT._current_context
    token = variable.set(inside[variable])
    check()
    variable.reset(token)
    check()
    assert inside.run(lambda *given, **named: (given, named), 1, a=2) == ((1,), {"a": 2})


async def tasks():
    async def work(depth):
        for _ in range(20):
            check()
            with tracer.start_as_current_span("task"):
                check()
                await asyncio.sleep(0)
                check()
                await asyncio.to_thread(nested)
                check()
                if depth:
                    await asyncio.gather(work(depth - 1), work(depth - 1))
                check()
            check()
            await asyncio.sleep(0.0001)

    with tracer.start_as_current_span("all"):
        await asyncio.gather(*(work(1) for _ in range(3)))
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(lambda: (check(), done.set_result(None)), context=contextvars.Context())
    await done
    check()


def loop():
    asyncio.run(tasks())
    with tracer.start_as_current_span("around"):
        asyncio.run(tasks())
        check()
    check()


def eager():
    global may_miss
    may_miss = "_asyncio" in sys.builtin_module_names and sys.version_info < (3, 14)

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        await tasks()

    asyncio.run(main())


def uvloop():
    global may_miss
    import uvloop as other

    async def first():  # here, the writer detects that the library has been loaded
        with tracer.start_as_current_span("first"):
            check()

    with asyncio.Runner(loop_factory=other.new_event_loop) as runner:
        may_miss = sys.version_info < (3, 14)
        runner.run(first())
        may_miss = False
        runner.run(tasks())
        with tracer.start_as_current_span("around"):
            runner.run(tasks())
            check()
    nested()


def cut_relro(library):
    """Makes the RELRO segment of a library end within a page, and returns its new end."""
    data = bytearray(Path(library).read_bytes())
    (headers,), (size, count) = (
        struct.unpack_from("Q", data, 32),
        struct.unpack_from("HH", data, 54),
    )
    for at in range(headers, headers + size * count, size):
        if struct.unpack_from("I", data, at)[0] == 0x6474E552:  # PT_GNU_RELRO
            address, length = (struct.unpack_from("Q", data, at + field)[0] for field in (16, 40))
            struct.pack_into("Q", data, at + 40, length - 8)
            Path(library).write_bytes(data)
            return address + length - 8
    raise LookupError("no RELRO segment")


def read_rights(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    raise LookupError(f"{address:#x} is not mapped")


def compile_runner(change=lambda library: None):
    """Compiles a full-RELRO C library that calls Python functions in a context.

    ``change`` is called with the library's path before the library is loaded.
    """
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/runner.so"
        words = ["gcc", "-shared", "-fPIC", "-Wl,-z,relro,-z,now", "-o", library, "-xc", "-"]
        source = """
            int PyContext_Enter(void *), PyContext_Exit(void *);
            void *PyObject_CallNoArgs(void *);
            void *run(void *context, void *function)
            {
                void *result = 0;
                if (PyContext_Enter(context))
                    return 0;
                result = PyObject_CallNoArgs(function);
                return PyContext_Exit(context) ? 0 : result;
            }"""
        subprocess.run(words, input=source, text=True, check=True)
        change(library)
        run = ctypes.PyDLL(library).run
    run.argtypes, run.restype = [ctypes.py_object, ctypes.py_object], ctypes.py_object
    return run


def c_code():
    """C code enters nested contexts, eventually more than the writer can track."""
    global may_miss
    run = compile_runner()

    def inside(depth):
        check()
        with tracer.start_as_current_span("inside"):
            check()
            if depth:
                run(contextvars.copy_context(), lambda: inside(depth - 1))
            check()

    may_miss = sys.version_info < (3, 14)  # the writer has yet to notice the library
    inside(1)
    may_miss = False
    inside(1)
    inside(8)
    try:
        run(contextvars.copy_context(), lambda: int("x"))
    except ValueError:
        check()
    may_miss = sys.version_info < (3, 14)
    inside(20)
    may_miss = False
    inside(8)


def c_code_in_part_of_a_page():
    """A page that is only partly RELRO remains writable after loading and hooking."""
    global may_miss
    ends = []
    run = compile_runner(lambda library: ends.append(cut_relro(library)))
    maps = Path("/proc/self/maps").read_text().splitlines()
    end = ends[0] + min(int(line.split("-")[0], 16) for line in maps if "runner.so" in line)
    assert read_rights(end) == "rw-p"

    def inside():
        with tracer.start_as_current_span("inside"):
            check()

    may_miss = sys.version_info < (3, 14)  # the writer has yet to notice the library
    run(contextvars.copy_context(), inside)
    may_miss = False
    run(contextvars.copy_context(), inside)
    assert read_rights(end) == "rw-p"


def trio():
    import trio as other

    async def work():
        for _ in range(50):
            check()
            with tracer.start_as_current_span("task"):
                await other.sleep(0)
                check()
                await other.to_thread.run_sync(nested)
                check()
            check()

    async def main():
        async with other.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(work)

    other.run(main)


def greenlets():
    with tracer.start_as_current_span("before the import"):
        check()
    import gevent

    def work():
        for _ in range(50):
            check()
            with tracer.start_as_current_span("greenlet"):
                check()
                gevent.sleep(0)
                check()
                contextvars.copy_context().run(inner)
                check()
            check()
            gevent.sleep(0)

    def inner():
        check()
        with tracer.start_as_current_span("inner"):
            gevent.sleep(0)
            check()

    nested()
    for _ in range(3):
        with tracer.start_as_current_span("main"):
            for task in [gevent.spawn(work) for _ in range(5)]:
                task.get()
            check()
    check()


def greenlets_are_traced_already():
    import greenlet

    seen = []
    greenlet.settrace(lambda event, switched: seen.append((event, len(switched))))
    nested()
    greenlet.greenlet(nested).switch()
    assert seen == [("switch", 2), ("switch", 2)]


class OtherSpan(trace.NonRecordingSpan):
    """A span from another library, which runs `act` when its context is requested."""

    act = staticmethod(lambda: None)

    def get_span_context(self):
        self.act()
        return super().get_span_context()


class TimeLimit(Exception):  # noqa: N818 - as services name it
    """An exception that a signal handler raises."""


class Stop(BaseException):
    """An exception that is not a subclass of `Exception`."""


def once(act):
    acts = iter([act])
    return staticmethod(lambda: next(acts, int)())


def interrupts():
    """Exceptions from signal handlers propagate; exceptions in the span's own code do not."""
    variable = context._RUNTIME_CONTEXT._current_context
    inside = trace.set_span_in_context(OtherSpan(trace.SpanContext(1, 2, is_remote=False)))
    around = contextvars.copy_context()
    around.run(variable.set, inside)
    token = None

    def change():
        nonlocal token
        token = variable.set(inside)
        int("0")

    def change_back():
        with tracer.start_as_current_span("outer"):
            variable.set(inside)
        variable.reset(token)
        int("0")

    def enter():
        around.run(int)
        int("0")

    for kind in (TimeLimit, Stop, KeyboardInterrupt, SystemExit):
        raised = kind("argument")

        def handle(*_, raised=raised):
            raise raised

        signal.signal(signal.SIGALRM, handle)
        for step in (change, change_back, enter):
            OtherSpan.act = once(lambda: signal.raise_signal(signal.SIGALRM))
            try:
                step()
            except kind as error:
                assert error is raised
                assert traceback_ends_in(error, handle)
            else:
                raise AssertionError(f"{kind.__name__} was lost in {step.__name__}")
            check()

    def work():
        identity = ctypes.c_ulong(threading.get_ident())
        stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
        for step in (change, change_back, enter):
            OtherSpan.act = once(lambda: (stop(identity, ctypes.py_object(Stop)), int("0")))
            try:
                step()
            except Stop:
                check()
            else:
                raise AssertionError("an exception set for the thread was lost")
        return "ended"

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == "ended"

    OtherSpan.act = staticmethod(lambda: {}["missing"])
    failures = thread_contexts._writer.count_failures()
    variable.set(inside)
    assert read_record() is None
    assert thread_contexts._writer.count_failures() == failures + 1
    OtherSpan.act = staticmethod(lambda: None)


def traceback_ends_in(error, function):
    traceback = error.__traceback__
    while traceback.tb_next:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code is function.__code__


def changes_context():
    """A span may change the current context, or run code in another one, to return its context."""

    def change():
        context.detach(context.attach(context.set_value("key", "value")))

    another = tracer.start_span("another")

    def change_to_another_span():
        with trace.use_span(another):
            check()

    def run():
        contextvars.copy_context().run(int)

    def leave():
        context.attach(context.set_value("key", "value"))

    span = OtherSpan(trace.SpanContext(1, 2, is_remote=False))
    for act in (change, change_to_another_span, run, leave):
        OtherSpan.act = staticmethod(act)
        with trace.use_span(span):
            assert read_record()[:2] == (1, 2)
            contextvars.copy_context().run(int)
            assert read_record()[:2] == (1, 2)
        OtherSpan.act = staticmethod(lambda: None)
        nested()


def no_python_code():
    """Publishing an SDK span runs no Python code, so signal handlers cannot interrupt it."""
    import greenlet
    import uvloop as other

    called = []
    variable = context._RUNTIME_CONTEXT._current_context
    inside = trace.set_span_in_context(tracer.start_span("span"))

    def change():
        sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
        variable.reset(variable.set(inside))
        contextvars.copy_context().run(int)
        sys.setprofile(None)

    async def main():
        change()

    change()
    threading.Thread(target=change).start()
    greenlet.greenlet(change).switch()
    asyncio.run(main())
    with asyncio.Runner(loop_factory=other.new_event_loop) as runner:
        runner.run(main())
    assert called == []
    nested()


def check_announcement():
    extra = read_process_context(os.getpid()).extra
    assert extra["threadlocal.schema_version"] == "tlsdesc_v1_dev", extra


def fork():
    def check_child():
        check()
        nested()
        check_announcement()

    with tracer.start_as_current_span("parent"):
        check()
        check_in_child(check_child)
        check()


def c_fork():
    """A child forked by C code, without Python's hooks, announces its records at its first span."""
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    thread_context.start()
    tracer = provider.get_tracer("test")

    def check_child():
        check()
        assert read_process_context(os.getpid()) is None
        with tracer.start_as_current_span("child"):
            check()
            check_announcement()
        check()

    with tracer.start_as_current_span("parent"):
        check()
        check_in_child(check_child, ctypes.PyDLL(None).fork)
        check()


def import_interpreters():
    return importlib.import_module(
        "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    )


def subinterpreters():
    """Code in other interpreters does not change records, and cannot start the writer."""
    interpreters = import_interpreters()
    code = """if True:
        import contextvars
        variable = contextvars.ContextVar("variable")
        variable.reset(variable.set(1))
        contextvars.copy_context().run(variable.set, 2)
        contextvars.Context().run(int)
    """
    others = [interpreters.create() for _ in range(2)]
    with tracer.start_as_current_span("around"):
        for other in others:
            interpreters.run_string(other, code)
            check()
        with tracer.start_as_current_span("inner"):
            contextvars.copy_context().run(interpreters.run_string, others[0], code)
            check()
        threads = [
            threading.Thread(target=interpreters.run_string, args=(other, code)) for other in others
        ]
        for thread in threads:
            thread.start()
            check()
        for thread in threads:
            thread.join()
        for other in others:
            interpreters.destroy(other)
            check()
    nested()
    contexts()


def start_in_a_subinterpreter():
    """A start in a subinterpreter is rejected; a later start in the main interpreter succeeds."""
    interpreters = import_interpreters()
    reading, writing = os.pipe()
    other = interpreters.create()
    code = f"""if True:
        import os, sys
        sys.path[:] = {sys.path!r}
        try:
            from otel_kprofiler import thread_context
            thread_context.start()
            answer = "started"
        except Exception as error:
            answer = str(error)
        os.write({writing}, answer.encode())
    """
    interpreters.run_string(other, code)
    answer = os.read(reading, 1000).decode()
    if sys.version_info < (3, 12):  # later versions refuse to import some of the packages
        assert "cannot run in a subinterpreter" in answer, answer
    assert answer != "started"
    thread_context.start({"service.name": "scenarios"})
    nested()
    interpreters.destroy(other)
    nested()
    contexts()


def attributes():
    with labels(tenant="acme"):
        assert read_record() is None
        with tracer.start_as_current_span("span"), labels(region="ö" * 150):
            number = names().index("region")
            assert read_record()[3] == {names().index("tenant"): "acme", number: "ö" * 127}
        with tracer.start_as_current_span("span"):
            assert read_record()[3] == {names().index("tenant"): "acme"}
    with tracer.start_as_current_span("span"):
        assert read_record()[3] == {}


def endpoints():
    """A record has labels, and the name that the local root had when the current span started."""
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    thread_context.start()
    tracer = provider.get_tracer("test")
    number = names().index("otel_kprofiler.local_root_span.name") if names() else 0

    def endpoint():
        return (read_record()[3] or {}).get(number)

    def check_child():
        assert endpoint() == "GET /a/{id}"
        with tracer.start_as_current_span("inner"):
            assert endpoint() == "GET /a/{id}"

    with tracer.start_as_current_span("GET", attributes={"http.request.method": "GET"}) as root:
        assert names() == ("otel_kprofiler.local_root_span.name",)
        assert endpoint() == "GET"
        root.set_attribute("http.route", "/a/{id}")
        with tracer.start_as_current_span("inner"):
            assert endpoint() == "GET /a/{id}"
            with labels(tenant="acme"):
                assert sorted(read_record()[3].values()) == ["GET /a/{id}", "acme"]
            with labels({f"label{at}": "x" * 200 for at in range(3)}):  # nearly fill the record
                assert endpoint() is None
                assert len(read_record()[3]) == 3
            assert endpoint() == "GET /a/{id}"
        assert endpoint() == "GET /a/{id}"
        check_in_child(check_child)
    remote = trace.SpanContext(5, 6, is_remote=True, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(remote)):
        assert endpoint() is None
        with tracer.start_as_current_span("from afar"):
            assert endpoint() == "from afar"
    of_spans = thread_contexts._writer._of_spans
    assert of_spans == {}
    for at in range(3000):
        with tracer.start_as_current_span(f"name {at}"):
            assert endpoint() == f"name {at}"
    assert len(thread_contexts._writer._endpoints) <= 1024
    assert of_spans == {}


def names():
    return read_process_context(os.getpid()).extra["threadlocal.attribute_key_map"]


def ends():
    """The writer can be stopped and restarted, and exited threads do not leak memory."""
    thread_context.stop()
    assert "threadlocal.schema_version" not in read_process_context(os.getpid()).extra
    nested()
    thread_context.start()
    assert names() == ()
    gc.collect()
    count = len(gc.get_objects())
    for _ in range(500):
        thread = threading.Thread(target=nested)
        thread.start()
        thread.join()
    gc.collect()
    assert len(gc.get_objects()) < count + 100


def fail_to_start():
    """If the start fails, the hooks that were already installed are removed."""
    taken = []
    add = getattr(ctypes.pythonapi, "PyContext_AddWatcher", None)
    find_methods = thread_contexts._methods
    methods = [dict(find_methods(kind)) for kind in (contextvars.ContextVar, contextvars.Context)]
    if add:  # context watchers were added in 3.14
        ignore = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.py_object)(lambda *_: 0)
        taken = [add(ignore) for _ in range(8)]
    else:
        without_run = {k: v for k, v in methods[1].items() if k != "run"}
        hooked = {contextvars.ContextVar: find_methods(contextvars.ContextVar)}
        thread_contexts._methods = lambda kind: hooked.get(kind, without_run)
    for _ in range(2):
        try:
            thread_context.start({"service.name": "scenarios"})
        except HostError as error:
            assert "watcher" in str(error) if add else "no method run" in str(error)
        else:
            raise AssertionError("no HostError")
    thread_contexts._methods = find_methods
    for number in taken:
        ctypes.pythonapi.PyContext_ClearWatcher(number)
    assert methods == [find_methods(kind) for kind in (contextvars.ContextVar, contextvars.Context)]


def begin_after_a_failure():
    nested()
    contexts()


def begin_in_a_context():
    thread_context.start({"service.name": "scenarios"})
    nested()
    contexts()
    loop()


if __name__ == "__main__":
    if sys.argv[1] == "start_in_a_subinterpreter":
        start_in_a_subinterpreter()
    elif sys.argv[1] == "begin_in_a_context":
        contextvars.copy_context().run(begin_in_a_context)
    else:
        if sys.argv[1] == "begin_after_a_failure":
            fail_to_start()
        thread_context.start({"service.name": "scenarios"})
        globals()[sys.argv[1]]()
    sys.stdout.write(f"{checked} {linked}\n")
