"""The manifests of config/kubernetes."""

from ruamel.yaml import YAML

from otel_kprofiler.config import load_config
from tests.collector.units import ROOT, UNIT, parse_unit


def test_the_kubernetes_manifest_contains_a_valid_configuration(tmp_path):
    documents = list(YAML(typ="safe").load_all(ROOT / "config/kubernetes/daemonset.yaml"))
    (config,) = [found for found in documents if found["kind"] == "ConfigMap"]
    path = tmp_path / "agent.yaml"
    path.write_text(config["data"]["agent.yaml"])
    environ = {"NODE_IP": "10.0.0.1", "NODE_NAME": "worker"}
    loaded = load_config(str(path), environ=environ).config
    assert loaded.exporters["otlp_grpc"].endpoint == "10.0.0.1:4317"
    (daemons,) = [found for found in documents if found["kind"] == "DaemonSet"]
    pod = daemons["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostPID"]
    names = {entry["name"] for entry in container["env"]}
    assert names == environ.keys()
    capabilities = container["securityContext"]["capabilities"]
    unit = parse_unit(UNIT.read_text())["AmbientCapabilities"][0].split()
    assert [f"CAP_{name}" for name in capabilities["add"]] == unit
    port = int(loaded.service.health.endpoint.rpartition(":")[2])
    assert container["livenessProbe"]["httpGet"]["port"] == port
