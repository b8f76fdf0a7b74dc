"""The manifests in config/kubernetes, validated by Kubernetes code and run with a Collector.

The gateway's test, in which a fake API server returns a cluster's objects, checks that agents send
the attributes by which the processor identifies pods.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from ruamel.yaml import YAML

from otel_kprofiler.model import COARSE
from tests.agents import Agent
from tests.collector.conftest import GATE, build
from tests.collector.go_tools import build_program
from tests.processes import LoggedProcess
from tests.servers import HttpServer, free_ports

pytestmark = pytest.mark.timeout(2400)

HERE = Path(__file__).parent
DIRECTORY = HERE.parents[1] / "config/kubernetes"
CONTAINER = "4c01db0b339c8f9a9f6e1d0c7c5d0a1be4d6a1d3d0d2b1e7c5f3a9b8c7d6e5f4"
WITH_KUBERNETES = "0.159.0"
"""Collector version whose test build includes the gateway's processor and extension."""
WITH_CLICKHOUSE = "0.161.0"


def documents(name):
    return list(YAML(typ="safe").load_all(DIRECTORY / name))


def configuration(name, key):
    (result,) = [document for document in documents(name) if document["kind"] == "ConfigMap"]
    return YAML(typ="safe").load(result["data"][key])


def validate(text):
    program = build_program(HERE / "manifests")
    done = subprocess.run([program], input=text, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("name", ["daemonset.yaml", "gateway.yaml"])
def test_an_api_server_accepts_the_manifests(name):
    status, lines = validate((DIRECTORY / name).read_text())
    assert lines == [f"{document['kind']} valid" for document in documents(name)]
    assert status == 0


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("verbs:", "verb:", 'unknown field "rules[0].verb"'),
        ("IfNotPresent", "Sometimes", "imagePullPolicy: Unsupported value"),
        ("memory: 1Gi", "memory: 1 GB", "quantities must match"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "runAsNonRoot"),
        ("drop: [ALL]", "drop: [SYS_ADMIN]", "unrestricted capabilities"),
        ("targetPort: otlp-http", "targetPort: OTLP", "targetPort"),
    ],
)
def test_the_api_server_rejects_an_invalid_manifest(right, wrong, complaint):
    text = (DIRECTORY / "gateway.yaml").read_text()
    assert right in text
    status, lines = validate(text.replace(right, wrong))
    assert status == 1
    assert [line for line in lines if complaint in line], lines


def test_the_collector_accepts_every_key_in_the_gateway_configuration(tmp_path):
    """Uses two Collectors, since neither includes all components in the image's distribution."""
    whole = configuration("gateway.yaml", "collector.yaml")
    for version in (WITH_KUBERNETES, WITH_CLICKHOUSE):
        config = json.loads(json.dumps(whole))
        pipelines = config["service"]["pipelines"].values()
        if version == WITH_KUBERNETES:
            config["exporters"] = {"debug": None}
            for pipeline in pipelines:
                pipeline["exporters"] = ["debug"]
        else:
            del config["processors"]["k8s_attributes"], config["extensions"]
            del config["service"]["extensions"]
            for pipeline in pipelines:
                pipeline["processors"] = ["memory_limiter"]
        path = tmp_path / f"{version}.json"
        path.write_text(json.dumps(config))
        environ = {"CLICKHOUSE": "tcp://127.0.0.1:9000", "CLICKHOUSE_USER": "default"}
        done = subprocess.run(
            [build(version), "validate", "--config", path, GATE],
            env={**os.environ, **environ, "CLICKHOUSE_PASSWORD": "secret"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


POD = {
    "metadata": {
        "name": "cart-6f7d9c8b5d-x2x7p",
        "namespace": "shop",
        "labels": {"pod-template-hash": "6f7d9c8b5d"},
        "uid": "3f1c8a54-6f0e-4a53-9a0c-0c7d6ad1b9c2",
        "resourceVersion": "7",
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": "cart-6f7d9c8b5d",
                "uid": "b6f5e3b1-0d4f-4c53-8d3e-7f1f5b8f2a11",
                "controller": True,
            }
        ],
    },
    "spec": {
        "nodeName": "worker",
        "containers": [{"name": "app", "image": "registry.example/cart:1.4.2"}],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "startTime": "2026-01-01T00:00:00Z",
        "containerStatuses": [
            {
                "name": "app",
                "image": "registry.example/cart:1.4.2",
                "imageID": "registry.example/cart@sha256:" + "0" * 64,
                "containerID": f"containerd://{CONTAINER}",
                "restartCount": 0,
                "ready": True,
            }
        ],
    },
}
OBJECTS = {"/api/v1/pods": ("Pod", POD)}


class ApiServer(HttpServer):
    """Serves a pod to list and watch requests, and records all requests."""

    def __init__(self):
        self.asked, self.closing = set(), threading.Event()
        super().__init__(self._answer)

    def close(self):
        self.closing.set()
        super().close()

    def _answer(self, request):
        parts = urlsplit(request.path)
        query = parse_qs(parts.query)
        self.asked.add(parts.path)
        request.close_connection = True
        if parts.path not in OBJECTS:
            request.send_error(403)
            return
        kind, results = OBJECTS[parts.path]
        results = {"apiVersion": "v1", "kind": kind, **results}
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Connection", "close")
        request.end_headers()

        def write(value):
            request.wfile.write(json.dumps(value).encode() + b"\n")

        if query.get("watch") in (["true"], ["1"]):
            if query.get("sendInitialEvents") == ["true"]:
                done = {
                    "resourceVersion": "9",
                    "annotations": {"k8s.io/initial-events-end": "true"},
                }
                bookmark = {"apiVersion": "v1", "kind": kind, "metadata": done}
                for event, about in (("ADDED", results), ("BOOKMARK", bookmark)):
                    write({"type": event, "object": about})
            self.closing.wait(120)
            return
        listed = {"apiVersion": "v1", "kind": f"{kind}List", "metadata": {"resourceVersion": "9"}}
        write({**listed, "items": [results]})


@contextlib.contextmanager
def spinning(path, environ):
    """Runs a CPU-bound program whose comm is the file name of ``path``."""
    shutil.copy("/bin/bash", path)
    command = [path, "-c", "while :; do :; done"]
    with LoggedProcess(command, path.with_suffix(".log"), environ=environ):
        yield


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def read_resources(text):
    """Yields the attributes of every Resource in a Collector's file, with references resolved."""
    for line in text.splitlines():
        request = json.loads(line)
        strings = request["dictionary"]["stringTable"]
        for result in request["resourceProfiles"]:
            yield {
                strings[entry["keyStrindex"]]: strings[entry["value"].get("stringValueStrindex", 0)]
                for entry in result["resource"]["attributes"]
            }


def services(path):
    """Returns the service names in a Collector's file, except from an incomplete last line."""
    if not path.exists():
        return set()
    whole = path.read_text().rpartition("\n")[0]
    return {attributes.get("service.name") for attributes in read_resources(whole)}


@pytest.mark.live
def test_the_gateway_adds_pod_names_to_profiles_of_containers(tmp_path, sampling_host):
    program = build(WITH_KUBERNETES)
    grpc, http_port, health, agent_health = free_ports(4)
    output = tmp_path / "profiles.jsonl"
    gateway = configuration("gateway.yaml", "collector.yaml")
    protocols = gateway["receivers"]["otlp"]["protocols"]
    protocols["grpc"]["endpoint"] = f"127.0.0.1:{grpc}"
    protocols["http"]["endpoint"] = f"127.0.0.1:{http_port}"
    gateway["extensions"]["health_check"]["endpoint"] = f"127.0.0.1:{health}"
    gateway["processors"]["k8s_attributes"]["auth_type"] = "kubeConfig"
    gateway["exporters"] = {"file": {"path": str(output), "flush_interval": "50ms"}, "debug": None}
    gateway["service"]["pipelines"]["profiles"]["exporters"] = ["file"]
    gateway["service"]["pipelines"]["metrics"]["exporters"] = ["debug"]
    gateway["service"]["telemetry"] = {"metrics": {"level": "none"}}
    agent = configuration("daemonset.yaml", "agent.yaml")
    receiver = agent["receivers"]["kprofiler"]
    receiver["resource"]["container.id"] = CONTAINER
    receiver["target_comms"] = ["unnamed", "named"]
    receiver["reporter_interval"] = "1s"
    exporter = agent["exporters"]["otlp_grpc"]
    exporter["endpoint"] = f"127.0.0.1:{grpc}"
    exporter["sending_queue"]["storage"] = str(tmp_path / "spool")
    agent["service"]["health"]["endpoint"] = f"127.0.0.1:{agent_health}"
    (tmp_path / "gateway.json").write_text(json.dumps(gateway))
    cluster = {"name": "test", "cluster": {}}
    api = ApiServer()
    cluster["cluster"]["server"] = api.url
    access = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": []}
    access["contexts"] = [{"name": "test", "context": {"cluster": "test", "user": ""}}]
    access["current-context"] = "test"
    (tmp_path / "kubeconfig").write_text(json.dumps(access))
    collector = [program, "--config", tmp_path / "gateway.json", GATE]
    of_gateway = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    with (
        contextlib.closing(api),
        spinning(tmp_path / "unnamed", {}),
        spinning(tmp_path / "named", {"OTEL_SERVICE_NAME": "checkout"}),
        LoggedProcess(collector, tmp_path / "gateway.log", environ=of_gateway) as receiving,
    ):
        receiving.wait_until(lambda: answers(f"http://127.0.0.1:{health}/"))
        with Agent(tmp_path, json.dumps(agent), environ={"NODE_NAME": "worker"}) as sending:
            for path in ("livez", "readyz"):
                url = f"http://127.0.0.1:{agent_health}/{path}"
                sending.wait_until(lambda url=url: answers(url))
            sending.wait_until(lambda: services(output) == {"cart", "checkout"})
            sending.stop()
    resources = list(read_resources(output.read_text()))
    expected = {
        "container.id": CONTAINER,
        "k8s.container.name": "app",
        "k8s.deployment.name": "cart",
        "k8s.namespace.name": "shop",
        "k8s.node.name": "worker",
        "k8s.pod.name": "cart-6f7d9c8b5d-x2x7p",
        "k8s.pod.uid": "3f1c8a54-6f0e-4a53-9a0c-0c7d6ad1b9c2",
        "container.image.name": "registry.example/cart",
        "container.image.tag": "1.4.2",
    }
    names = {}
    for attributes in resources:
        assert expected.items() <= attributes.items()
        if COARSE not in attributes:  # on a busy host, the environment is read in a later window
            names[attributes["process.executable.name"]] = attributes["service.name"]
    assert names == {"unnamed": "cart", "named": "checkout"}
    assert api.asked == {"/api/v1/pods"}, "the ClusterRole allows no more"
