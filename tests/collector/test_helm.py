"""The rendered Helm chart matches the manifests in config/kubernetes, and passes helm's checks."""

import subprocess

import pytest
from ruamel.yaml import YAML

from otel_kprofiler.config import load_config
from otel_kprofiler.version import __version__
from tests.chart import CHART
from tests.collector.go_tools import BUILD_SECONDS, build_tool
from tests.collector.test_kubernetes import DIRECTORY, documents, validate

pytestmark = pytest.mark.timeout(BUILD_SECONDS)

OF_HELM = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
    "checksum/config",
}
"""Labels and annotations that exist only in a Helm release."""
COLLECTOR = "config.exporters.otlp_grpc.endpoint=collector.example:4317"


def helm(*words, values=""):
    program = build_tool("helm", "v3.22.0", "helm.sh/helm/v3/cmd/helm")
    return subprocess.run([program, *words], input=values, capture_output=True, text=True)


def template(*words, values="", release="otel-kprofiler"):
    options = ["--namespace", "otel-kprofiler", "--values", "-", *words]
    return helm("template", release, CHART, *options, values=values)


def render(*words, **more):
    done = template(*words, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_kind(text):
    return {entry["kind"]: entry for entry in YAML(typ="safe").load_all(text) if entry}


def without_release(value):
    """Removes release-specific fields from a manifest, and parses its configurations."""
    if isinstance(value, list):
        return [without_release(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_release(entry) for key, entry in value.items() if key not in OF_HELM}
    if "agent.yaml" in kept:
        kept["agent.yaml"] = YAML(typ="safe").load(kept["agent.yaml"])
    if kept.get("annotations") == {}:
        del kept["annotations"]
    return kept


def agent_of(text, tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text(by_kind(text)["ConfigMap"]["data"]["agent.yaml"])
    return load_config(str(path), environ={"NODE_NAME": "worker", "RATE": "97"}).config


def pod_of(text):
    return by_kind(text)["DaemonSet"]["spec"]["template"]["spec"]


def test_the_rendered_helm_chart_matches_the_manifests():
    rendered = without_release(by_kind(render()))
    for entry in rendered.values():
        assert entry["metadata"].pop("labels") == {"app.kubernetes.io/name": "otel-kprofiler"}
    plain = {entry["kind"]: without_release(entry) for entry in documents("daemonset.yaml")}
    del plain["Namespace"]  # helm creates the namespace
    assert rendered == plain


def test_helm_lint_accepts_the_chart():
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_the_chart_versions_match_the_agent_version():
    chart = YAML(typ="safe").load(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__


EVERYTHING = """
image: {repository: registry.example/otel-kprofiler, tag: 1.2.3, pullPolicy: Always}
imagePullSecrets: [{name: registry}]
config:
  receivers: {kprofiler: {samples_per_second: "${env:RATE}", service_name: null}}
  exporters:
    otlp_grpc: null
    otlp_http: {endpoint: "https://collector.example:4318", tls: {ca_file: /certificates/ca.crt}}
  service:
    health: {endpoint: "0.0.0.0:8080"}
    pipelines: {profiles: {exporters: [otlp_http]}}
stateDirectory: /var/lib/other
env: [{name: RATE, value: "97"}]
envFrom: [{secretRef: {name: headers}}]
volumes: [{name: certificates, secret: {secretName: certificates}}]
volumeMounts: [{name: certificates, mountPath: /certificates, readOnly: true}]
serviceAccount: {create: false, name: existing}
resources: {requests: {cpu: 50m}, limits: {memory: 512Mi}}
tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
nodeSelector: {kubernetes.io/arch: amd64}
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
  {matchExpressions: [{key: profiled, operator: Exists}]}]}}}
priorityClassName: system-node-critical
terminationGracePeriodSeconds: 60
maxUnavailable: 3
podAnnotations: {team: performance}
podLabels: {team: performance}
"""


@pytest.mark.parametrize("values", ["", EVERYTHING], ids=["defaults", "every value"])
def test_an_api_server_accepts_the_rendered_chart(values):
    text = render(values=values)
    expected = ["Namespace", *by_kind(text)]
    namespace, mark, _ = (DIRECTORY / "daemonset.yaml").read_text().partition("---\n")
    status, lines = validate(namespace + mark + text)
    assert lines == [f"{kind} valid" for kind in expected]
    assert status == 0


def test_chart_values_reach_the_pod_and_the_agents_configuration(tmp_path):
    text = render(values=EVERYTHING)
    assert by_kind(text).keys() == {"ConfigMap", "DaemonSet"}
    config = agent_of(text, tmp_path)
    assert config.exporters.keys() == {"otlp_http"}
    assert config.receivers.kprofiler.samples_per_second == 97
    assert config.receivers.kprofiler.resource == {"host.name": "worker", "k8s.node.name": "worker"}
    pod = pod_of(text)
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/otel-kprofiler:1.2.3"
    assert container["livenessProbe"]["httpGet"]["port"] == 8080
    assert container["resources"]["limits"] == {"memory": "512Mi"}
    assert pod["serviceAccountName"] == "existing"
    assert [entry["key"] for entry in pod["tolerations"]] == [
        "node-role.kubernetes.io/control-plane"
    ]
    assert {
        "name": "state",
        "hostPath": {"path": "/var/lib/other", "type": "DirectoryOrCreate"},
    } in (pod["volumes"])
    mounted = {entry["name"] for entry in container["volumeMounts"]}
    assert mounted == {entry["name"] for entry in pod["volumes"]}


def test_a_single_option_sets_the_collector_address(tmp_path):
    config = agent_of(render("--set", COLLECTOR), tmp_path)
    assert config.exporters["otlp_grpc"].endpoint == "collector.example:4317"
    assert config.exporters["otlp_grpc"].sending_queue.storage == "/var/lib/otel-kprofiler/spool"


def test_a_changed_configuration_restarts_the_agents():
    def annotations(*words):
        return by_kind(render(*words))["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations() == annotations("--set", "maxUnavailable=2")
    assert annotations() != annotations("--set", COLLECTOR)


def test_probes_are_omitted_without_a_health_endpoint():
    (container,) = pod_of(render("--set", "config.service.health.endpoint="))["containers"]
    assert not [key for key in container if key.endswith("Probe")]


def test_objects_from_two_releases_have_different_names():
    first = by_kind(render(release="staging"))
    second = by_kind(render(release="production"))
    assert first["DaemonSet"]["metadata"]["name"] == "staging-otel-kprofiler"
    for kind, entry in first.items():
        assert entry["metadata"]["name"] != second[kind]["metadata"]["name"]
    selectors = [entry["DaemonSet"]["spec"]["selector"] for entry in (first, second)]
    assert selectors[0] != selectors[1]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("image.pullPolicy=Sometimes", "'/image/pullPolicy': value must be one of"),
        ("resorces.limits.memory=1Gi", "additional properties 'resorces' not allowed"),
        ("maxUnavailable=0%", "'/maxUnavailable'"),
        ("stateDirectory=spool", "'/stateDirectory'"),
        ("config.receivers.kprofiler.rate=99", "additional properties 'rate' not allowed"),
        ("config.receivers.kprofiler.stacks=some", "'/config/receivers/kprofiler/stacks'"),
        ("config.exporters.kafka.brokers=b", "additional properties 'kafka' not allowed"),
    ],
)
def test_helm_rejects_invalid_values(wrong, complaint):
    done = template("--set", wrong)
    assert done.returncode != 0
    assert complaint in done.stderr
