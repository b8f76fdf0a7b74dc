"""The alert rules and dashboards in config/ work with a real Prometheus and ClickHouse's engine.

The tests use the agent's code to send metrics to Prometheus. Each series that an alert or a panel
queries must exist under the queried name and labels.
"""

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from otel_kprofiler.agent import agent_config
from otel_kprofiler.agent.cpu_time import CpuTime
from otel_kprofiler.agent.telemetry import Readings, Telemetry
from otel_kprofiler.config import parse_config
from otel_kprofiler.export import ExportOutcome, ExportResult
from otel_kprofiler.model import Account, ExporterAccount, LossCause
from tests.collector.go_tools import BUILD_SECONDS, build_program, build_tool
from tests.collector.test_clickhouse import NEEDS_ENGINE, engine, stored
from tests.processes import LoggedProcess
from tests.servers import free_ports

__all__ = ["engine", "stored"]  # fixtures

pytestmark = pytest.mark.timeout(BUILD_SECONDS)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RULES = ROOT / "config/prometheus/otel-kprofiler.rules.yaml"
ALERT_TESTS = ROOT / "tests/data/prometheus/alerts.yaml"
BOARDS = sorted((ROOT / "config/grafana").glob("*.json"))
PROMETHEUS = "v0.313.5"
AGENT = """
receivers: {{kprofiler: {{resource: {{host.name: worker}}}}}}
exporters: {{otlp_http: {{endpoint: "{endpoint}"}}}}
service:
  telemetry: {{metrics: {{interval: 100ms}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_http]}}}}
"""


def rules():
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    return group["rules"]


def panels(name):
    return json.loads((ROOT / "config/grafana" / name).read_text())["panels"]


def expressions():
    for rule in rules():
        yield rule["alert"], rule["expr"], ""
    for panel in panels("agents.json"):
        for target in panel["targets"]:
            text = target["expr"].replace("$host", ".*").replace("$__rate_interval", "5m")
            yield panel["title"], text, target["legendFormat"]


class Prometheus(LoggedProcess):
    """A running Prometheus that accepts OTLP."""

    def __init__(self, directory):
        program = build_tool(
            "prometheus",
            PROMETHEUS,
            "github.com/prometheus/prometheus/cmd/prometheus",
            "remove_all_sd",
        )
        (port,) = free_ports(1)
        config = directory / "prometheus.yml"
        promoted = "otlp: {promote_resource_attributes: [host.name]}\n"
        assert promoted.strip() in " ".join(RULES.read_text().split()), "as its head says"
        config.write_text(f"{promoted}rule_files: ['{RULES}']\n")
        self.address = f"http://127.0.0.1:{port}"
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--web.enable-otlp-receiver",
        ]
        super().__init__(command, directory / "log")

    def ask(self, path, **words):
        address = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return json.loads(answer.read())["data"]

    def wait_until(self, condition, *options):
        def is_met():
            with contextlib.suppress(OSError):
                return condition()

        return super().wait_until(is_met, *options)


def lossy_account():
    lost = {LossCause.REJECTED: 5, LossCause.QUEUE_FULL: 2}
    exporter = ExporterAccount("otlp_http", 80, lost, 10)
    exporters = (ExporterAccount.of_kinds("otlp_http", {"on_cpu": exporter}),)
    sampled = {"on_cpu": Account(100, 97, {LossCause.RING_FULL: 3}, missed=6)}
    return Account.of_kinds(sampled, exporters)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    running = Prometheus(tmp_path_factory.mktemp("prometheus"))
    with running:
        running.wait_until(lambda: running.ask("status/buildinfo"))
        telemetry = Telemetry(Readings(
            lossy_account, lambda: 7, lambda: {"queue_full": 4},
            lambda: CpuTime(1.5, 0.5, 2.0, 0.25), lambda: {"stack": 8},
        ))  # fmt: skip
        with contextlib.closing(telemetry):
            config = AGENT.format(endpoint=f"{running.address}/api/v1/otlp")
            parsed = parse_config(config, path="agent.yaml", environ={})
            telemetry.configure(agent_config(parsed.config))
            telemetry.on_export("otlp_http", ExportResult(ExportOutcome.SUCCESS, {}), 0.1)
            name = "otel_sdk_exporter_operation_duration_seconds_count"
            running.wait_until(lambda: running.ask("query", query=name)["result"])
            yield running


def selectors(node):
    if isinstance(node, list):
        for inner in node:
            yield from selectors(inner)
    elif isinstance(node, dict):
        if node.get("type") in ("vectorSelector", "matrixSelector"):
            yield node
        else:
            yield from selectors(list(node.values()))


def labels_of(node):
    if isinstance(node, list):
        return {label for inner in node for label in labels_of(inner)}
    if not isinstance(node, dict):
        return set()
    matching = node.get("matching") or {}
    mentioned = {*(node.get("grouping") or []), *(matching.get("labels") or [])}
    return mentioned | labels_of(list(node.values()))


@pytest.mark.parametrize(("title", "text", "legend"), list(expressions()))
def test_the_agent_sends_every_series_that_rules_and_panels_query(prometheus, title, text, legend):
    tree = prometheus.ask("parse_query", query=text)
    wanted = list(selectors(tree))
    assert wanted
    every = {}
    for selector in wanted:
        matchers = ",".join(
            f"{entry['name']}{entry['type']}{json.dumps(entry['value'])}"
            for entry in selector["matchers"]
        )
        series = prometheus.ask("series", **{"match[]": f"{{{matchers}}}"})
        assert series, f"{title}: nothing for {matchers}"
        asked = {entry["name"] for entry in selector["matchers"] if entry["value"] != ""}
        for entry in series:
            assert asked <= entry.keys(), "a label that is never there matches all of .*"
            every |= entry
    assert labels_of(tree) - {"le"} <= every.keys()
    for entry in prometheus.ask("query", query=text)["result"]:
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= entry["metric"].keys()


def test_prometheus_evaluates_the_alert_rules_without_errors(prometheus):
    (group,) = prometheus.ask("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in rules()]
    assert not [rule for rule in group["rules"] if rule.get("lastError")]


def promtool(*words):
    program = build_tool(
        "promtool", PROMETHEUS, "github.com/prometheus/prometheus/cmd/promtool", "remove_all_sd"
    )
    return subprocess.run([program, *words], capture_output=True, text=True)


def test_promtool_accepts_the_rules():
    done = promtool("check", "rules", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_passing_rule_test_in_which_it_fires():
    done = promtool("test", "rules", ALERT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    fired = {
        entry["alertname"]
        for case in YAML(typ="safe").load(ALERT_TESTS)["tests"]
        for entry in case["alert_rule_test"]
        if entry.get("exp_alerts")
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_the_monitoring_page_has_a_row_for_each_alert():
    page = (ROOT / "docs/monitoring.md").read_text()
    rows = re.findall(r"^\| `(Kprofiler\w+)` \|", page, re.MULTILINE)
    assert rows == [rule["alert"] for rule in rules()]


def check_board(text):
    program = build_program(HERE / "dashboards")
    done = subprocess.run([program], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_conform_to_grafanas_schema(path):
    assert check_board(path.read_text()) == (0, ["valid"])


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ('"legendFormat"', '"legend"', "unexpected field 'legend'"),
        ('"fieldConfig"', '"fields"', "unexpected field 'fields'"),
        ('"graphMode"', '"mode"', "graphMode: required field is missing"),
    ],
)
def test_the_schema_rejects_an_invalid_dashboard(right, wrong, complaint):
    text = (ROOT / "config/grafana/agents.json").read_text()
    assert right in text
    status, lines = check_board(text.replace(right, wrong))
    assert status == 1
    assert [line for line in lines if complaint in line], lines


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path):
    taken = set()
    for panel in panels(path.name):
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def expand(sql):
    """Expands a query as Grafana's ClickHouse data source does."""
    start = "toStartOfInterval(toDateTime(Timestamp), INTERVAL 60 second)"
    for macro, text in (
        ("$__timeFilter(Timestamp)", "Timestamp >= toDateTime(0) AND Timestamp <= now() + 86400"),
        ("$__timeInterval(Timestamp)", start),
        ("$__interval_s", "60"),
        ("$database", "otel"),
        ("${service:singlequote}", "SELECT ServiceName FROM otel.otel_profiles"),
    ):
        sql = sql.replace(macro, text)
    assert "$" not in sql
    return sql


@NEEDS_ENGINE
def test_clickhouse_returns_rows_for_the_query_of_each_grafana_panel(engine, stored):
    answers = {}
    for panel in panels("profiles.json"):
        (target,) = panel["targets"]
        answers[panel["title"]] = engine.ask(expand(target["rawSql"]))
    assert all(answers.values()), {title for title, rows in answers.items() if not rows}
    seconds = sum(float(row[1]) for row in answers["Services"])
    assert sum(float(row[2]) * 60 for row in answers["CPU by service"]) == pytest.approx(seconds)
    assert sum(float(row[2]) for row in answers["Functions"]) == pytest.approx(seconds)


@NEEDS_ENGINE
def test_the_dashboards_service_variable_lists_all_services(engine, stored):
    board = json.loads((ROOT / "config/grafana/profiles.json").read_text())
    (variable,) = [entry for entry in board["templating"]["list"] if entry["name"] == "service"]
    assert len(engine.ask(expand(variable["query"]))) > 1
