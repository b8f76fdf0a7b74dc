"""An asyncio service that logs each step of each task."""

import asyncio
import os
import signal
import sys

from step_log import step
from tracing import tracer


def work():
    for _ in range(10):
        os.listdir("/proc/self/task")
    sum(range(10_000))


async def pause(span):
    step(None)
    await asyncio.sleep(0)
    step(span)


def in_thread(parent):
    step(parent)
    work()
    step(None)
    with tracer.start_as_current_span("in a thread") as span:
        step(span)
        work()
        step(None)
    step(parent)
    step(None)


async def child(parent):
    """A task that runs in its creator's span, and then in a new span."""
    step(parent)
    work()
    await pause(parent)
    work()
    step(None)
    with tracer.start_as_current_span("child") as span:
        step(span)
        work()
        await pause(span)
        work()
        step(None)
    step(parent)
    step(None)


async def serve(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    with tracer.start_as_current_span("request") as span:
        step(span)
        for _ in range(3):
            work()
            await pause(span)
        step(None)
        await asyncio.gather(child(span), child(span), asyncio.to_thread(in_thread, span))
        step(span)
        work()
        step(None)
    writer.write(b"HTTP/1.0 200 OK\r\n\r\nok\n")
    await writer.drain()
    writer.close()


async def main(port):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        await stop.wait()


asyncio.run(main(int(sys.argv[1])))
