"""``view --listen`` behind a real Collector shows what ``report`` prints for the Collector's file.

``KPROFILER_VIEW_S=600`` runs the agent for ten minutes instead of a few seconds, and compares
minutes instead of five-second windows (``make test-view MINUTES=10``).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import page
from tests.agents import Agent
from tests.commands import COMMAND, run_command
from tests.further import further

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800), pytest.mark.usefixtures("sampling_host")]

SECONDS = float(os.environ.get("KPROFILER_VIEW_S", "7"))
STEP_S = 60 if SECONDS > 120 else 3
SIDES = {1: "[kernel]", 4: "[user]", 5: "[python]"}
"""The name that ``report`` prints for each frame kind in the page's data."""
MAX_RSS_KIB = 150 << 10
PIPELINES = """
    profiles: {receivers: [otlp], exporters: [file, debug, %s]}
"""
AGENT = """
receivers:
  kprofiler: {{samples_per_second: 99, stacks: both, user_symbols: names, reporter_interval: 1s}}
exporters:
  otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}
"""


@pytest.fixture
def view():
    """Runs ``view``, and yields its process, its URL, and its gRPC and HTTP receiver addresses."""
    free = ["--listen", "127.0.0.1:0", "--listen-http", "127.0.0.1:0", "--no-browser"]
    command = subprocess.Popen(
        [*COMMAND, "view", *free], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with command:
        try:
            grpc, http = (command.stderr.readline().split()[-1] for _ in range(2))
            address = re.search(r"http://\S+", command.stdout.readline())[0]
            yield command, address, grpc, http
        finally:
            command.kill()


def run_agent(directory, endpoint, is_enough):
    """Runs the agent under load until enough samples have arrived. Returns the exported samples."""

    def is_loaded():
        load = ["nice", sys.executable, "-m", "benchmarks.mixed_load", str(SECONDS)]
        subprocess.run(load, timeout=SECONDS + 120)
        return is_enough()

    with Agent(directory, AGENT.format(endpoint=endpoint)) as agent:
        agent.wait_until_it_samples()
        agent.wait_until(is_loaded, SECONDS + 120)
        return agent.stop()["exporters"]["otlp_grpc"]["exported"]


def ask(address, **query):
    words = "&".join(f"{name}={value}" for name, value in query.items())
    with urllib.request.urlopen(f"{address}profile.json?{words}", timeout=60) as answer:
        return page.unpacked(json.load(answer))


def functions(data):
    """Returns self and total samples by function and module, summed over a function's lines."""
    strings, frames, nodes = data["strings"], data["frames"], data["nodes"]

    def key(node):
        at = nodes["frame"][node]
        name, module, reason = (strings[frames[one][at]] for one in ("name", "module", "reason"))
        if reason and not name.startswith(("[truncated", "[no ", "fun_")):
            name = f"[{reason}]"
        base = re.escape(module.rpartition("/")[2])
        name = re.sub(rf" \({base}(:\d+)?\)$", "", name)
        return name, module or SIDES[frames["kind"][at]]

    own, total = Counter(), Counter()
    for leaf, count in zip(data["samples"]["node"], data["samples"]["count"], strict=True):
        node, path = leaf, []
        while nodes["parent"][node] >= 0:  # the root is the process
            path.append(key(node))
            node = nodes["parent"][node]
        path = path or [("[no stack]", "")]
        own[path[0]] += count
        total.update(dict.fromkeys(path, count))
    return own, total


def reported(path, start, end):
    """Returns each function's self and total samples in ``report``, and the sample count."""
    since, until = (datetime.fromtimestamp(each, tz=UTC).isoformat() for each in (start, end))
    done = run_command("report", path, "--json", "--from", since, "--to", until, timeout=300)
    if "no sample is in the time range" in done.stderr:
        return Counter(), Counter(), 0
    assert done.returncode == 0, done.stderr
    kinds = json.loads(done.stdout)["kinds"]
    own, total = Counter(), Counter()
    for group in (group for kind in kinds for group in kind["groups"]):
        key = group["name"], group["place"] or ""
        period = kinds[0]["total"] // kinds[0]["samples"]
        own[key], total[key] = group["samples"], group["total"] // period
    return own, total, sum(kind["samples"] for kind in kinds)


@pytest.mark.parametrize("kind", ["otlp", *further("otlphttp")][: 1 if SECONDS > 120 else 2])
def test_the_page_and_report_agree_on_a_file_written_by_the_collector(
    open_collector, samples_of, view, tmp_path, kind
):
    command, address, grpc, http = view
    exporter = f"{kind}: {{endpoint: '{grpc if kind == 'otlp' else f'http://{http}'}'"
    collector = open_collector(
        pipelines=PIPELINES % kind, exporters=f"{exporter}, tls: {{insecure: true}}}}"
    )
    started = time.time()
    endpoint = collector.grpc_endpoint
    exported = run_agent(tmp_path, endpoint, lambda: len(samples_of(collector.arrived())) > 99)
    ended = time.time()
    collector.stop()  # the Collector first delivers pending data
    whole = ask(address)
    count = sum(whole["samples"]["count"])
    compared = 0
    for start in range(int(started), int(ended) + 1, STEP_S):
        shown = ask(address, **{"from": start * 1000, "to": (start + STEP_S) * 1000})
        own, total, samples = reported(collector.output, start, start + STEP_S)
        assert sum(shown["samples"]["count"]) == samples
        assert functions(shown) == (+own, +total)
        compared += samples
    assert compared == count == exported > 99
    status = Path(f"/proc/{command.pid}/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
    size = f"{count:,} samples, {len(whole['nodes']['frame']):,} nodes"
    sys.stdout.write(f"{size}, at most {peak >> 10} MB\n")
    assert peak <= MAX_RSS_KIB
    command.send_signal(signal.SIGINT)
    assert command.wait(120) == 0
    assert f"{count:,} samples kept, 0 too old" in command.stderr.read()
