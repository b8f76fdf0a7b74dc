"""An asyncio service whose kernel samples are linked to their tasks' spans.

    OTEL_SERVICE_NAME=lists OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 \
    OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf OTEL_KPROFILER_SAMPLES_PER_SECOND=99 \
    python asyncio_service.py 8080
"""  # noqa: D208 - the command is indented

import asyncio
import os
import signal
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_kprofiler import KernelProfiler

tracer = trace.get_tracer("asyncio_service")


def list_processes() -> int:
    """Lists directories in /proc, to generate work in the kernel."""
    with tracer.start_as_current_span("list"):
        return sum(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task", "ns"))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a request in a span, interleaved with other requests."""
    await reader.readuntil(b"\r\n\r\n")
    with tracer.start_as_current_span("request"):
        count = 0
        for _ in range(8):
            count += list_processes()
            await asyncio.sleep(0)
        count += await asyncio.to_thread(list_processes)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n%d\n" % count)
        await writer.drain()
    writer.close()


async def main(port: int) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        await stop.wait()


if __name__ == "__main__":
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    with KernelProfiler.from_env():
        asyncio.run(main(int(sys.argv[1])))
