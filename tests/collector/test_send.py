"""The files that this package and Collectors write can be sent to a Collector with ``send``."""

import json

import pytest

from otel_kprofiler.model import KERNEL_SIDE, STACK_OK, Frame, Line, Side, Stack, WindowSample
from otel_kprofiler.otlp import encode_window
from tests.commands import run_checked
from tests.further import further
from tests.windows import make_window

SECOND = 1_000_000_000


def window(number):
    start = (1_700_000_000 + number) * SECOND
    frames = tuple(
        Frame(None, 0xFFFF0000 + at, (Line(f"function_{at}"),), 0, KERNEL_SIDE)
        for at in range(number + 1)
    )
    stack = Stack((Side(KERNEL_SIDE, frames, STACK_OK),))
    groups = (
        (
            {"process.pid": pid, "service.name": "shop"},
            [WindowSample(stack, pid, "main", 1, None, [start + pid, start + pid + 1])],
        )
        for pid in (10, 20)
    )
    return make_window(start, start + SECOND, *groups)


def received(collector):
    collector.stop()
    return [json.loads(line) for line in collector.output.read_bytes().splitlines()]


@pytest.mark.parametrize("kind", ["grpc", *further("http")])
def test_files_written_by_this_package_or_a_collector_are_delivered_unchanged(
    open_collector, samples_of, tmp_path, kind
):
    path = tmp_path / "x.otlp"
    payloads = [encode_window(window(number)).batches[0].payload for number in range(3)]
    path.write_bytes(b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads))

    def send_to_new(path):
        collector = open_collector()
        grpc, http = f"grpc://{collector.grpc_endpoint}", collector.http_endpoint
        done = run_checked("send", path, grpc if kind == "grpc" else http, timeout=300)
        assert "sent 12 samples in 3 requests to " in done.stdout
        return collector.output, samples_of(received(collector))

    written, first = send_to_new(path)
    assert len(first) == 12
    assert {dict(sample[0])["service.name"] for sample in first} == {"shop"}
    assert b"keyStrindex" in written.read_bytes(), "it writes references"
    _, second = send_to_new(written)
    assert second == first
