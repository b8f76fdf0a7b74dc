"""Receivers as strict as Pyroscope and Parca accept all requests and drop no samples."""

import os
import subprocess
import sys

import pytest
from samplers import spawned
from unwind_maps import compile_c

from tests.agents import Agent
from tests.commands import run_checked
from tests.further import further, further_of
from tests.strict_receiver import NO_FUNCTION, NO_SERVICE

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("sampling_host")]

AGENT = """
receivers:
  kprofiler:
    samples_per_second: 199
    stacks: both
    send_idle_frames: true
    reporter_interval: 500ms
    {receiver}
exporters:
  otlp_grpc: {{endpoint: "{grpc}", tls: {{insecure: true}}, {exporter}}}
  otlp_http/proto: {{endpoint: "{http}", {exporter}}}
  otlp_http/json: {{endpoint: "{http}", encoding: json, {exporter}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    profiles: {{receivers: [kprofiler], exporters: [otlp_grpc, otlp_http/proto, otlp_http/json]}}
"""
WORK = """
import os, time
end = time.thread_time() + 0.5
while time.thread_time() < end:
    os.listdir("/proc/self/task")
"""


KINDS = ("grpc", "application/x-protobuf", "application/json")
REFUSAL = "attribute key at index 0 in resource attributes is empty"


def run_agent(receiver, directory, *, exporter="", of_receiver=""):
    """Runs the agent until each kind of request has arrived twice; returns its counts and log."""
    configuration = AGENT.format(
        grpc=receiver.grpc, http=receiver.http, exporter=exporter, receiver=of_receiver
    )

    def is_enough():
        arrived = min(len(receiver.accepted.get(kind, ())) for kind in KINDS)
        return arrived > 1 or agent.log.count("(logged once)") >= len(KINDS)

    with Agent(directory, configuration) as agent:
        agent.wait_until(is_enough)
        return agent.stop()["exporters"], agent.log


@pytest.mark.parametrize("grain", ["process", *further("host", "executable")])
def test_strict_receivers_find_no_violations_in_the_agents_profiles(receiver, tmp_path, grain):
    exporters, log = run_agent(
        receiver,
        tmp_path,
        exporter="unnamed_frames: names",
        of_receiver=f"resources: {grain}\n    resource: {{service.name: fleet}}",
    )
    assert receiver.refused == []
    assert receiver.complaints == {kind: {} for kind in KINDS}
    for name, kind in zip(exporters, KINDS, strict=True):
        assert exporters[name]["exported"] == receiver.samples(kind) > 0, log


@pytest.fixture
def stripped(tmp_path):
    with spawned(compile_c(tmp_path / "stripped", "int main(void) { for (;;); }", "-s")) as process:
        yield process


@pytest.mark.parametrize(
    ("of_receiver", "missed"),
    [
        pytest.param("", {NO_FUNCTION}, id="default", marks=pytest.mark.long),
        pytest.param(
            "service_name: {from: []}", {NO_SERVICE, NO_FUNCTION}, id="names of services off"
        ),
    ],
)
def test_strict_receivers_report_missing_names_unless_settings_add_them(
    receiver, stripped, tmp_path, of_receiver, missed
):
    target = f"target_pids: [{stripped.pid}]\n    {of_receiver}"
    run_agent(receiver, tmp_path, of_receiver=target)
    assert receiver.refused == []
    for complaints in receiver.complaints.values():
        assert complaints.keys() == missed


@pytest.mark.long
def test_strict_receivers_reject_string_references_and_the_loss_is_counted(receiver, tmp_path):
    exporters, log = run_agent(receiver, tmp_path, exporter="attributes: references")
    assert receiver.accepted == {}
    assert REFUSAL in log
    for account in exporters.values():
        assert account["exported"] == 0
        assert account["lost"].keys() - {"shutdown"} == {"rejected"}  # requests may be in flight


@pytest.mark.parametrize("kind", further_of(KINDS, ["application/json"]))
def test_strict_receivers_accept_attributes_from_recordings_and_services(receiver, kind, tmp_path):
    protocol = "http/json" if kind == "application/json" else "http/protobuf"
    address = f"grpc://{receiver.grpc}" if kind == "grpc" else receiver.http
    env = {**os.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    run_checked("record", "-d", "1s", "--idle", "--export", address, env=env)
    recorded = receiver.samples(kind)
    assert recorded > 0
    service = tmp_path / "service.py"
    service.write_text(WORK)
    env = {
        **os.environ,
        "OTEL_SERVICE_NAME": "service",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PROFILES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if kind == "grpc" else protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": address.replace("grpc://", "http://"),
        "OTEL_KPROFILER_SAMPLES_PER_SECOND": "199",
    }
    command = [os.path.join(os.path.dirname(sys.executable), "opentelemetry-instrument")]
    done = subprocess.run(
        [*command, sys.executable, service], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert receiver.samples(kind) > recorded, done.stderr
    assert receiver.refused == []
