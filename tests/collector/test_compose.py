"""Docker Compose accepts the demo in examples/compose, and the demo's services work together.

The tests need no images. The tests run the page, the Collector, ClickHouse's engine and the agent
on this host, with the commands and files that Compose resolves, but at other addresses.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from otel_kprofiler.config import load_config
from otel_kprofiler.version import __version__
from tests import page
from tests.agents import Agent
from tests.collector.clickhouse_server import PASSWORD, USER
from tests.collector.conftest import VERSIONS, build
from tests.collector.go_tools import BUILD_SECONDS, build_tool
from tests.collector.test_clickhouse import NEEDS_ENGINE, engine
from tests.collector.test_kubernetes import documents
from tests.processes import LoggedProcess
from tests.servers import free_ports

__all__ = ["engine"]  # a fixture

pytestmark = pytest.mark.timeout(BUILD_SECONDS)

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/compose"
PATIENCE_S = 120


def compose(path=DEMO / "compose.yaml"):
    program = build_tool("docker-compose", "v5.5.0", "github.com/docker/compose/v5/cmd")
    words = ["-f", path, "--profile", "*", "config", "--format", "json"]
    return subprocess.run([program, *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def services():
    done = compose()
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "no warning"
    return json.loads(done.stdout)["services"]


def sources(service):
    """Returns the host paths of a service's bind mounts, by path in the container."""
    bound = [volume for volume in service.get("volumes", []) if volume["type"] == "bind"]
    return {volume["target"]: Path(volume["source"]) for volume in bound}


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("cap_add:", "capabilities:", "additional properties 'capabilities' not allowed"),
        ("depends_on: [collector]", "depends_on: [gateway]", "undefined service"),
        ("retries: 30", "retries: often", "retries"),
    ],
)
def test_the_schema_rejects_an_invalid_compose_file(tmp_path, right, wrong, complaint):
    text = (DEMO / "compose.yaml").read_text()
    assert right in text
    path = tmp_path / "compose.yaml"
    path.write_text(text.replace(right, wrong))
    done = compose(path)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_every_mounted_file_exists(services):
    places = [place for service in services.values() for place in sources(service).values()]
    assert len(places) >= 5
    assert [place for place in places if not place.exists()] == []
    for service in services.values():
        if "build" in service:
            assert service["image"] == f"otel-kprofiler:{__version__}"
            assert Path(service["build"]["context"], service["build"]["dockerfile"]).is_file()


def test_the_agent_has_the_privileges_and_mounts_of_the_daemonset(services):
    agent = services["agent"]
    (daemon,) = [entry for entry in documents("daemonset.yaml") if entry["kind"] == "DaemonSet"]
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    security = container["securityContext"]
    assert agent["cap_add"] == security["capabilities"]["add"]
    assert agent["cap_drop"] == security["capabilities"]["drop"]
    assert agent["read_only"] == security["readOnlyRootFilesystem"]
    assert agent["user"] == "0:0"
    assert agent["pid"] == "host"
    assert agent["security_opt"] == ["no-new-privileges:true"]
    assert not agent.get("privileged")
    assert agent["command"] == container["args"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["target"] for volume in agent["volumes"]} - mounts == {
        "/etc/otel-kprofiler/agent.yaml"
    }


def test_pages_have_no_capabilities_and_only_port_8080_is_published(services):
    for name in ("page", "report"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert not {"cap_add", "pid", "user"} & services[name].keys(), "the image's user is nobody"
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert [(port["host_ip"], port["published"]) for port in published] == [("127.0.0.1", "8080")]


def test_addresses_in_the_configuration_refer_to_existing_services(services):
    path = sources(services["agent"])["/etc/otel-kprofiler/agent.yaml"]
    config = load_config(str(path), environ={}).config
    assert config.exporters["otlp_grpc"].endpoint == "collector:4317"
    storage = config.exporters["otlp_grpc"].sending_queue.storage
    volumes = [volume for volume in services["agent"]["volumes"] if volume["type"] == "volume"]
    assert [volume for volume in volumes if storage.startswith(volume["target"])]
    collector = services["collector"]
    assert collector["environment"] == services["clickhouse"]["environment"]
    assert collector["environment"]["CLICKHOUSE"] == "tcp://clickhouse:9000"
    assert "endpoint: page:4317" in (DEMO / "collector.yaml").read_text()
    assert "0.0.0.0:4317" in services["page"]["command"]
    assert services["report"]["entrypoint"][-1].startswith("clickhouse://clickhouse:")


def replace_all(text, pairs):
    for old, new in pairs.items():
        assert old in text
        text = text.replace(old, new)
    return text


def shows_the_service(address):
    with urllib.request.urlopen(f"{address}profile.json", timeout=60) as answer:
        return "look_up" in " ".join(page.unpacked(json.load(answer))["strings"])


def stored_services(engine):
    if "otel_profiles" not in [name for (name,) in engine.ask("SHOW TABLES FROM otel")]:
        return set()
    query = "SELECT DISTINCT ServiceName, SampleType FROM otel.otel_profiles"
    return {tuple(row) for row in engine.ask(query)}


@pytest.mark.long
@NEEDS_ENGINE
@pytest.mark.live
@pytest.mark.usefixtures("sampling_host")
def test_source_lines_from_the_demo_service_reach_clickhouse_and_the_page(
    services, engine, tmp_path
):
    grpc, http, shown, web = free_ports(4)
    logs = {name: tmp_path / f"{name}.log" for name in ("orders", "page", "collector")}
    command = [str(shown).join(word.split("4317")) for word in services["page"]["command"]]
    command[command.index("8080")] = str(web)
    view = [sys.executable, "-m", "otel_kprofiler", *command, "--listen-http", "127.0.0.1:0"]
    demo = tmp_path / "demo.yaml"
    pairs = {
        "0.0.0.0:4317": f"127.0.0.1:{grpc}",
        "0.0.0.0:4318": f"127.0.0.1:{http}",
        "page:4317": f"127.0.0.1:{shown}",
    }
    demo.write_text(replace_all((DEMO / "collector.yaml").read_text(), pairs))
    # chDB does not accept compressed blocks.
    extra = (
        "yaml:{exporters: {clickhouse: {compress: none, sending_queue: {batch: "
        "{flush_timeout: 1s}}}}, service: {telemetry: {metrics: {level: none}}}}"
    )
    places = sources(services["collector"])
    words = services["collector"]["command"]
    words = [word.replace("/etc/otelcol/demo.yaml", str(demo)) for word in words]
    words = [
        word.replace("/etc/otelcol/gateway.yaml", str(places["/etc/otelcol/gateway.yaml"]))
        for word in words
    ]
    environ = {
        "CLICKHOUSE": f"http://127.0.0.1:{engine.port}?compress=none",
        "CLICKHOUSE_USER": USER,
        "CLICKHOUSE_PASSWORD": PASSWORD,
    }
    collector = [build(VERSIONS[0]), *words, f"--config={extra}"]
    pairs = {
        "collector:4317": f"127.0.0.1:{grpc}",
        "/var/lib/otel-kprofiler/spool": str(tmp_path / "spool"),
    }
    configuration = replace_all((DEMO / "agent.yaml").read_text(), pairs)
    script = sources(services["orders"])["/app/slow_orders.py"]
    of_orders = services["orders"]["environment"]
    with (
        LoggedProcess([sys.executable, script], logs["orders"], environ=of_orders),
        LoggedProcess(view, logs["page"]) as shows,
        LoggedProcess(collector, logs["collector"], environ=environ) as stores,
    ):
        stores.wait_for_line("Everything is ready")
        address = shows.wait_until(lambda: re.search(r"http://\S+", shows.log))[0]
        address = address.replace("0.0.0.0", "127.0.0.1")
        both = {("orders", "samples"), ("orders", "off_cpu")}
        with Agent(tmp_path, configuration):
            stores.wait_until(lambda: both <= stored_services(engine), PATIENCE_S)
            shows.wait_until(lambda: shows_the_service(address), PATIENCE_S)
