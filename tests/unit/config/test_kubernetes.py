"""The manifests in config/kubernetes agree with the agent, the systemd unit and each other."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from otel_kprofiler.config import load_config
from tests.collector.units import UNIT, parse_unit

DIRECTORY = Path(__file__).parents[3] / "config/kubernetes"


def read(name):
    return list(YAML(typ="safe").load_all(DIRECTORY / name))


def only(documents, kind):
    (result,) = [document for document in documents if document["kind"] == kind]
    return result


@pytest.fixture
def agent(tmp_path):
    """Returns the DaemonSet's pod, its container, and the configuration in its ConfigMap."""
    documents = read("daemonset.yaml")
    pod = only(documents, "DaemonSet")["spec"]["template"]["spec"]
    path = tmp_path / "agent.yaml"
    path.write_text(only(documents, "ConfigMap")["data"]["agent.yaml"])
    (container,) = pod["containers"]
    environ = {entry["name"]: "worker" for entry in container["env"]}
    assert environ.keys() == {"NODE_NAME", "MALLOC_MMAP_THRESHOLD_", "TMPDIR"}
    return pod, container, load_config(str(path), environ=environ).config


def test_the_agent_has_exactly_the_privileges_of_the_systemd_unit(agent):
    pod, container, _ = agent
    assert pod["hostPID"]
    assert not pod["automountServiceAccountToken"]
    security = container["securityContext"]
    unit = parse_unit(UNIT.read_text())["AmbientCapabilities"][0].split()
    assert security["capabilities"]["drop"] == ["ALL"]
    assert [f"CAP_{name}" for name in security["capabilities"]["add"]] == unit
    assert security["readOnlyRootFilesystem"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not security["privileged"]
    assert not security["allowPrivilegeEscalation"]


def test_the_agents_probes_query_its_health_endpoint(agent):
    _, container, config = agent
    port = int(config.service.health.endpoint.rpartition(":")[2])
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container[kind]["httpGet"]
        assert probe["port"] == port
        assert probe["path"] in ("/livez", "/readyz")


def test_the_agent_can_read_the_hosts_cgroups_and_pod_names(agent):
    """The host's files are mounted read-only below /host, to avoid hiding the container's files."""
    pod, container, _ = agent
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    mounted = {
        mount["mountPath"]: paths[mount["name"]]
        for mount in container["volumeMounts"]
        if mount.get("readOnly") and paths[mount["name"]]
    }
    assert mounted == {
        "/host/sys/fs/cgroup": "/sys/fs/cgroup",
        "/var/log/containers": "/var/log/containers",
        "/var/log/pods": "/var/log/pods",
    }


def test_the_agents_spool_is_on_a_host_path_volume(agent):
    pod, container, config = agent
    storage = config.exporters["otlp_grpc"].sending_queue.storage
    (mount,) = [
        mount for mount in container["volumeMounts"] if storage.startswith(f"{mount['mountPath']}/")
    ]
    assert not mount.get("readOnly")
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert "hostPath" in volume, "it outlives the pod"


def test_the_agent_sends_to_the_gateway(agent):
    _, _, config = agent
    gateway = read("gateway.yaml")
    service = only(gateway, "Service")
    host, _, port = config.exporters["otlp_grpc"].endpoint.rpartition(":")
    assert host == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    (entry,) = [entry for entry in service["spec"]["ports"] if entry["port"] == int(port)]
    template = only(gateway, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    collector = YAML(typ="safe").load(only(gateway, "ConfigMap")["data"]["collector.yaml"])
    protocols = collector["receivers"]["otlp"]["protocols"]
    assert protocols["grpc"]["endpoint"] == f"0.0.0.0:{ports[entry['targetPort']]}"
    assert protocols["http"]["endpoint"] == f"0.0.0.0:{ports['otlp-http']}"
    assert collector["extensions"]["health_check"]["endpoint"] == f"0.0.0.0:{ports['health']}"
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert container[kind]["httpGet"]["port"] == "health"
    (rule,) = only(gateway, "NetworkPolicy")["spec"]["ingress"]
    assert {entry["port"] for entry in rule["ports"]} == {ports["otlp-grpc"], ports["otlp-http"]}
    (sender,) = rule["from"]
    daemon = only(read("daemonset.yaml"), "DaemonSet")
    labels = daemon["spec"]["template"]["metadata"]["labels"]
    assert sender["podSelector"]["matchLabels"].items() <= labels.items()
    (namespace,) = sender["namespaceSelector"]["matchLabels"].values()
    assert namespace == daemon["metadata"]["namespace"]


def test_the_gateway_receives_the_variables_used_in_its_configuration():
    gateway = read("gateway.yaml")
    (container,) = only(gateway, "Deployment")["spec"]["template"]["spec"]["containers"]
    text = only(gateway, "ConfigMap")["data"]["collector.yaml"]
    used = {part.partition("}")[0] for part in text.split("${env:")[1:]}
    assert used == {entry["name"] for entry in container["env"]} - {"GOMEMLIMIT"}


def test_the_gateway_may_read_pods_and_nothing_else():
    gateway = read("gateway.yaml")
    (rule,) = only(gateway, "ClusterRole")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    account = only(gateway, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    (subject,) = only(gateway, "ClusterRoleBinding")["subjects"]
    assert subject["name"] == only(gateway, "ServiceAccount")["metadata"]["name"] == account
