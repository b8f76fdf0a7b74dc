"""ASGI services (FastAPI, Django, anyio, asgiref) under uvicorn, with asyncio and uvloop."""

import asyncio
import functools
import socket
import threading
import time
from typing import Annotated, Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from tests.spans.interpreter import TRACER
from tests.spans.requests import request_until

Span = Any
"""The type of span parameters, so that FastAPI does not validate them."""


class Traced:
    """ASGI middleware that handles each request in a new span, and passes the span to the app."""

    def __init__(self, app, truth):
        self.app = app
        self.truth = truth

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.truth.observe(trace.INVALID_SPAN)
        with TRACER.start_as_current_span("server") as span:
            scope["tests.span"] = span
            self.truth.observe(span)
            await self.app(scope, receive, send)
            self.truth.observe()  # asgiref may leave another span current


def serve_asgi(app, truth, seconds, paths, loop):
    """Serves an application to clients for a few seconds. Uvicorn runs in the calling thread."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Traced(app, truth), loop=loop, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    failed = []

    def request():
        try:
            request_until(time.monotonic() + seconds, listening.getsockname()[1], paths)
        except (AssertionError, OSError) as error:
            failed.append(error)
        finally:
            server.should_exit = True

    clients = threading.Thread(target=request)
    clients.start()
    server.run(sockets=[listening])
    clients.join()
    listening.close()
    if failed:
        raise failed[0]


def make_fastapi(truth):
    """Builds an app with async and sync endpoints, dependencies, background tasks and streams."""
    from fastapi import BackgroundTasks, Depends, FastAPI, Request
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    def span_of(request: Request):
        span = request.scope["tests.span"]
        truth.observe(span)
        return span

    async def async_span_of(request: Request):
        span = request.scope["tests.span"]
        truth.observe(span)
        return span

    def opened(request: Request):
        span = span_of(request)
        yield span
        truth.observe(span)

    @app.get("/async")
    async def asynchronous(span: Annotated[Span, Depends(async_span_of)]):
        truth.observe(span)
        with TRACER.start_as_current_span("inner") as inner:
            await asyncio.sleep(0)
            truth.observe(inner)
        await asyncio.to_thread(truth.observe, span)

    @app.get("/def")
    def synchronous(span: Annotated[Span, Depends(span_of)], _: Annotated[Span, Depends(opened)]):
        truth.observe(span)
        with TRACER.start_as_current_span("inner") as inner:
            truth.observe(inner)

    @app.get("/background")
    async def background(tasks: BackgroundTasks, span: Annotated[Span, Depends(span_of)]):
        async def later():
            truth.observe(span)

        tasks.add_task(later)
        tasks.add_task(truth.observe, span)

    @app.get("/streamed")
    async def streamed(span: Annotated[Span, Depends(async_span_of)]):
        async def body():
            for _ in range(3):
                truth.observe(span)
                yield b"x"
                await asyncio.sleep(0)

        return StreamingResponse(body())

    @app.get("/streamed_by_threads")
    def streamed_by_threads(span: Annotated[Span, Depends(span_of)]):
        def body():
            for _ in range(3):
                truth.observe(span)
                yield b"x"

        return StreamingResponse(body())

    return app


def fastapi_service(truth, seconds, loop):
    paths = ["/async", "/def", "/background", "/streamed", "/streamed_by_threads"]
    serve_asgi(make_fastapi(truth), truth, seconds, paths, loop)


def django_asgi(truth, seconds, loop):
    """Django on ASGI, where asgiref runs synchronous middleware and views in threads."""
    from tests.spans import django_project

    app = django_project.set_up(truth, asynchronous=True)

    serve_asgi(app, truth, seconds, ["/plain", "/left", "/coroutine"], loop)


def anyio_threads(truth, seconds):
    """anyio, with task groups and with threads that call back into the loop."""
    import anyio
    import anyio.from_thread
    import anyio.to_thread

    async def call_back(span):
        truth.observe(span)

    def in_thread(span):
        truth.observe(span)
        anyio.from_thread.run(call_back, span)
        with TRACER.start_as_current_span("in thread") as inner:
            truth.observe(inner)
            anyio.from_thread.run(call_back, inner)
            anyio.from_thread.run_sync(truth.observe, inner)
        truth.observe(span)

    async def task():
        with TRACER.start_as_current_span("task") as span:
            truth.observe(span)
            await anyio.to_thread.run_sync(in_thread, span)
            truth.observe(span)

    async def main():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(task)

    anyio.run(main)


def asgiref_threads(truth, seconds):
    """asgiref calls to and from synchronous functions, some of which leave a span current."""
    from asgiref.sync import async_to_sync, sync_to_async

    def leave():
        span = TRACER.start_span("left")
        otel_context.attach(trace.set_span_in_context(span))
        truth.observe(span)
        return span

    async def inner(span):
        truth.observe(span)
        await asyncio.sleep(0)
        truth.observe(span)

    def call_back(span):
        truth.observe(span)
        async_to_sync(inner)(span)
        truth.observe(span)

    async def task():
        with TRACER.start_as_current_span("task") as span:
            await sync_to_async(truth.observe)(span)
            await sync_to_async(call_back, thread_sensitive=False)(span)
            truth.observe(span)
            left = await sync_to_async(leave)()
            truth.observe(left)
            await asyncio.sleep(0)
            truth.observe(left)
        truth.observe(trace.INVALID_SPAN)

    async def main():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.gather(*(task() for _ in range(4)))

    asyncio.run(main())


SCENARIOS = {
    "fastapi asyncio": functools.partial(fastapi_service, loop="asyncio"),
    "fastapi uvloop": functools.partial(fastapi_service, loop="uvloop"),
    "django asgi": functools.partial(django_asgi, loop="asyncio"),
    "django uvloop": functools.partial(django_asgi, loop="uvloop"),
    "anyio": anyio_threads,
    "asgiref": asgiref_threads,
}
