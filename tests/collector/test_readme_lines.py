"""The README's instructions for services and fleets work together on one host.

The lines for the agent, the embedded profiler and the Collector run unchanged, in a separate
network namespace with free ports. An exporter added to the Collector forwards the received data.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.collector.conftest import NEWEST, build
from tests.collector.units import ROOT
from tests.readme import block_below
from tests.waiting import wait_until

TOOLS = ("unshare", "nsenter", "ip")
LOAD = """
import os
def sort_orders():
    return sorted(map(str, range(9999)))
def list_orders():
    return [os.listdir("/proc/self/task") for _ in range(999)]
while True:
    sort_orders(), list_orders()
"""
RECEIVER = """
import signal, sys
from pathlib import Path
from tests.collector.conftest import FileReceiver
print(FileReceiver({"profiles": Path(sys.argv[1])}).url, flush=True)
signal.pause()
"""
FURTHER = """
exporters:
  otlp_http: {{endpoint: "{url}", compression: none, encoding: json}}
service: {{pipelines: {{profiles: {{exporters: [debug, otlp_http]}}}}}}
"""

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("sampling_host"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)} for a network with free ports",
    ),
]


@pytest.fixture
def start():
    """Returns a function that starts a command in the test's network until the test ends."""
    holder = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep inf"]
    with contextlib.ExitStack() as stack:

        def run(*words, **options):
            process = subprocess.Popen(words, start_new_session=True, **options)
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            return process

        network = run(*holder, stdout=subprocess.PIPE, text=True)
        with network.stdout:
            assert network.stdout.readline() == "ready\n"
        yield lambda *words, **options: run(
            "nsenter", "-t", str(network.pid), "-n", "--", *words, **options
        )


@pytest.fixture
def arrived(start, tmp_path):
    """Returns the file that stores data forwarded by the README's Collector, ``bin/otelcol``."""
    path = tmp_path / "profiles.jsonl"
    receiver = [sys.executable, "-c", RECEIVER, path]
    with start(*receiver, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout as out:
        url = out.readline().strip()
    (tmp_path / "further.yaml").write_text(FURTHER.format(url=url))
    otelcol = tmp_path / "bin/otelcol"
    otelcol.parent.mkdir()
    otelcol.write_text(f'#!/bin/sh\nexec {build(NEWEST)} "$@" --config {tmp_path}/further.yaml\n')
    otelcol.chmod(0o755)
    (otelcol.parent / "otel-kprofiler").symlink_to(Path(sys.executable).parent / "otel-kprofiler")
    (tmp_path / "config").symlink_to(ROOT / "config")
    return path


def wait_for(seen, arrived, log, samples_of, seconds=300):
    def find():
        lines = arrived.read_bytes().splitlines(keepends=True)
        samples = samples_of([json.loads(line) for line in lines if line.endswith(b"\n")])
        return samples if seen(samples) else None

    return wait_until(find, seconds, lambda: log.read_text()[-3000:])


def summarize(samples):
    """Counts samples by service and presence of kernel frames, and by service and function."""
    counts = Counter()
    for resource, _, _, _, frames, *_ in samples:
        service = dict(resource).get("service.name", "")
        counts[service, any(file == "vmlinux" for file, _, _ in frames)] += 1
        counts.update({(service, name) for _, _, names in frames for name in names})
    return counts


def has_all_of(service):
    """Returns a check for a service's user time, kernel time, Python names and kernel names."""
    functions = ("sort_orders", "list_orders", "do_syscall_64")
    wanted = [(service, side) for side in (False, True, *functions)]
    return lambda samples: all(map(summarize(samples).__getitem__, wanted))


def test_the_readmes_agent_and_service_examples_send_profiles_to_the_collector(
    start, arrived, tmp_path, samples_of
):
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    log = tmp_path / "log"
    (tmp_path / "agent.yaml").write_text(block_below("On a fleet", "yaml"))
    (tmp_path / "shop.py").write_text(LOAD)
    (tmp_path / "orders.py").write_text(block_below("In a service", "python") + LOAD)
    with open(log, "wb") as file:
        options = {"cwd": tmp_path, "stdout": file, "stderr": subprocess.STDOUT}
        start("sh", "-c", block_below("On a fleet"), env=environ, **options)
        for name in ("shop", "orders"):
            started = {**environ, "OTEL_SERVICE_NAME": name}
            start("nice", sys.executable, f"{name}.py", env=started, **options)

        def all_seen(samples):
            return has_all_of("shop")(samples) and has_all_of("orders")(samples)

        samples = wait_for(all_seen, arrived, log, samples_of)
    for resource, *_ in samples:  # short-lived processes have no name
        assert ("process.executable.name" in dict(resource)) <= ("service.name" in dict(resource))
    assert "kernel and user stacks" in log.read_text()  # the agent logs this at startup
