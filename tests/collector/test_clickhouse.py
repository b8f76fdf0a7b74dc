"""Commands read back profiles sent through the shipped gateway to ClickHouse."""

import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from otel_kprofiler.analysis import GROUPINGS, Filter, group_samples
from otel_kprofiler.cli import top_table
from otel_kprofiler.cli.report import command as report_command
from otel_kprofiler.cli.top_table import Table
from otel_kprofiler.cli.top_windows import View
from otel_kprofiler.clickhouse import (
    ALL,
    ProfileStore,
    Range,
    Selection,
    parse_address,
    rows,
    store,
)
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    PYTHON_SIDE,
    STACK_TRUNCATED,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    Unresolved,
    WaitCause,
    WaitState,
    Window,
    WindowSample,
    WindowWait,
    WindowWaker,
)
from otel_kprofiler.otlp import encode_window
from tests import page
from tests.agents import Agent
from tests.collector.clickhouse_server import PASSWORD, USER
from tests.collector.conftest import GATE
from tests.commands import COMMAND, run_checked, run_command
from tests.further import further
from tests.processes import LoggedProcess
from tests.servers import free_ports
from tests.waiting import wait_until

NEEDS_ENGINE = pytest.mark.skipif(
    not importlib.util.find_spec("chdb") or not importlib.util.find_spec("clickhouse_connect"),
    reason="needs chdb-core and clickhouse-connect",
)
pytestmark = NEEDS_ENGINE
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "collector"
DOCS = ROOT / "docs" / "backends.md"
PATIENCE_S = 120
TABLE = "otel.otel_profiles"
SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
WINDOWS = 30
LOST = {"on_cpu": 3 * WINDOWS, "off_cpu": 0}
REASONS = {f"[{reason.value}]" for reason in Unresolved}
SPAN = SpanLink(bytes(range(16)), bytes(range(8, 16)), "GET /orders/{id}")
ALL_TIMES = ["--from", "0s"]
GATEWAY = """
receivers:
  otlp:
    protocols: {{grpc: {{endpoint: "127.0.0.1:{grpc}"}}, http: {{endpoint: "127.0.0.1:{http}"}}}}
processors:
  resource: {{attributes: [{{key: k8s.cluster.name, value: blue, action: insert}}]}}
exporters:
  clickhouse: {{ttl: 0s, compress: none, sending_queue: {{batch: {{flush_timeout: 1s}}}}}}
  file: {{path: "{file}", flush_interval: 50ms}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    profiles: {{processors: [memory_limiter, transform, resource], exporters: [clickhouse, file]}}
"""
FILTERS = [
    [],
    ["--process", "shop-*"],
    ["--process", "1002"],
    ["--thread", "work?r-1"],
    ["--service", "[st]h*"],
    ["--container", "0123ab"],
    ["--attribute", "tenant=acme"],
    ["--attribute", "k8s.cluster.name=blue"],
    ["--cpus", "1-2"],
    ["--module", "nf-conntrack"],
    ["--module", "lib*"],
    ["--function", "it's_100%"],
    ["--span", SPAN.span_id.hex()[:6]],
    ["--endpoint", "GET *"],
    ["--kind", "off_cpu"],
    ["--side", "python", "--function", "handle"],
    ["--from", "3s", "--to", "11s", "--service", "shop"],
    *further(
        ["--service", "shop"],
        ["--function", "vfs_read"],
        ["--function", "*read"],
        ["--kind", "off_cpu", "--idle"],
    ),
]


def module(name, kind):
    return Module(name, kind, None, FileId(""), 0)


VMLINUX = module("vmlinux", ModuleKind.VMLINUX)
CONNTRACK = module("nf_conntrack", ModuleKind.LOADED)
BPF = module("bpf_prog_0123456789abcdef_count", ModuleKind.BPF)
LIBC = module("libc.so.6", ModuleKind.USER)


def kernel(name, address, code=VMLINUX):
    return Frame(code, address, (Line(name),), 0, KERNEL_SIDE)


ENTRY = kernel("entry_SYSCALL_64_after_hwframe", 0x10)
READ = (kernel("vfs_read", 0x200), kernel("ksys_read", 0x300), ENTRY)
INLINED = Frame(
    LIBC, 0x4000, (Line("copy", "", "copy.h", 7), Line("it's_100%", "", "io.c", 70)), 0, USER_SIDE
)
RECURSION = tuple(Frame(LIBC, 0x5000, (Line("walk", "", "io.c", 9),), 0, USER_SIDE) for _ in "123")
NAMELESS = Frame(LIBC, 0x6000, (), 0, USER_SIDE, Unresolved.NO_NAME)
PYTHON = tuple(
    Frame(None, 0, (Line(name, "", "/srv/shop/app.py", line),), 0, PYTHON_SIDE)
    for name, line in (("handle", 42), ("handle", 42), ("<module>", 99))
)
STACKS = [
    Stack.from_frames((*READ, INLINED, *PYTHON)),
    Stack.from_frames((kernel("nf_conntrack_in", 0x50, CONNTRACK), *READ[1:], NAMELESS)),
    Stack.from_frames((kernel("count", 0x9, BPF), *READ), {KERNEL_SIDE: STACK_TRUNCATED}),
    Stack.from_frames((*RECURSION, INLINED)),
    Stack.from_frames((NAMELESS,)),
    Stack(),
]


WAITS = [
    WindowWait(WaitState.RUNNABLE, WaitCause.RUN_QUEUE),
    WindowWait(WaitState.UNINTERRUPTIBLE, WaitCause.DISK, waker=WindowWaker(7, 8, "kworker")),
    WindowWait(WaitState.INTERRUPTIBLE, WaitCause.FUTEX, is_ended=False),
    WindowWait(WaitState.INTERRUPTIBLE, WaitCause.EPOLL),  # idle
]


def window(number):
    """Returns a window with two sample kinds and four processes, one without a service name."""
    start = START + number * SECOND
    groups, waits = [], []
    for at in range(4):
        pid = 1001 + at
        attributes = {
            "host.name": f"host-{at % 2}",
            "process.executable.name": f"shop-{at}",
            "process.pid": pid,
            **({"service.name": ("shop", "shipping")[at % 2]} if at else {}),
            **({"container.id": "0123abcd" * 8} if at == 2 else {}),
        }
        samples = [
            WindowSample(
                stack, pid + turn % 2, f"worker-{turn % 2}", turn % 3,
                SPAN if turn == 1 and at else None,
                [start + 1000 * at + turn + step * 7_000_000 for step in range(1 + turn)],
                labels=(("tenant", "acme"),) if turn == 2 else (),
            )
            for turn, stack in enumerate(STACKS[number % 2 :])
        ]  # fmt: skip
        groups.append(ResourceSamples(Resource(attributes), samples))
        waited = WindowSample(
            STACKS[0], pid, "worker-0", 0, SPAN, [start + 5, start + 6], [7_000, 90_000_000 + at],
            wait=WAITS[at],
        )  # fmt: skip
        waits.append(ResourceSamples(Resource(attributes), [waited]))
    on_cpu = Profile(ON_CPU, 10_101_010, groups, taken=100, lost={LossCause.RING_FULL: 3})
    return Window(start, start + SECOND, [on_cpu, Profile(OFF_CPU, 0, waits, taken=8)])


SAMPLES = sum(window(number).sample_count for number in range(WINDOWS))
OFF_CPU_SAMPLES = WINDOWS * 4 * 2


class Engine:
    """A server process that embeds the ClickHouse engine."""

    def __init__(self, directory):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.collector.clickhouse_server", directory],
            stdout=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        self.port = int(self._process.stdout.readline())

    def address(self, database="otel", user=""):
        return f"clickhouse://{user}127.0.0.1:{self.port}/{database}"

    def ask(self, query):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}", query.encode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return [line.split("\t") for line in answer.read().decode().splitlines()]

    def wait_for(self, samples):
        def count():
            ((result,),) = self.ask(f"SELECT sum(length(TimestampsUnixNano)) FROM {TABLE}")
            return int(result)

        wait_until(lambda: count() >= samples, PATIENCE_S)
        assert count() == samples

    def close(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("clickhouse") / "data")
    yield engine
    engine.close()


@contextmanager
def gateway(program, engine, directory):
    """Runs the shipped gateway, and yields its gRPC address, HTTP address and output file."""
    grpc, http = free_ports(2)
    file, extra = directory / "profiles.jsonl", directory / "extra.yaml"
    extra.write_text(GATEWAY.format(grpc=grpc, http=http, file=file))
    configs = [CONFIG / "gateway-clickhouse.yaml", extra]
    command = [program, *(f"--config={config}" for config in configs), GATE]
    environ = {"CLICKHOUSE": f"http://127.0.0.1:{engine.port}?compress=none"}
    with LoggedProcess(command, directory / "log", environ=environ) as process:
        process.wait_for_line("Everything is ready")
        yield f"grpc://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", file


@pytest.fixture(scope="module")
def stored(engine, tmp_path_factory):
    """Stores windows in the table, and returns the file to which the Collector wrote them."""
    from tests.collector.conftest import VERSIONS, build

    directory = tmp_path_factory.mktemp("gateway")
    with gateway(build(VERSIONS[0]), engine, directory) as (grpc, http, file):
        for address, numbers in ((grpc, range(0, WINDOWS, 2)), (http, range(1, WINDOWS, 2))):
            source = directory / "sent.otlp"
            parts = [batch.payload for n in numbers for batch in encode_window(window(n)).batches]
            source.write_bytes(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
            run("send", source, address)
        engine.wait_for(SAMPLES)
    return file


def run(*words, status=0, environ=None):
    done = run_command(*words, env={**os.environ, **(environ or {})})
    assert done.returncode == status, done.stderr
    return done.stdout if not status else done.stderr


def report(*words):
    """Runs ``report`` in this process, to save time, and parses its output."""
    try:
        done = CliRunner().invoke(
            report_command, ["--json", *map(str, words)], catch_exceptions=False
        )
    finally:
        gc.enable()  # the command disables garbage collection
    return json.loads(done.stdout)["kinds"]


def comparable(kinds, words=()):
    """Removes details that the table does not store: reasons for missing names, and addresses."""
    for kind in kinds:
        groups = Counter()
        for group in kind["groups"]:
            nameless = group["name"] in REASONS or group["name"].startswith("fun_")
            key = group["place"] if nameless else (group["name"], group["place"])
            groups[key] += group["self"] + group["total"] * 1j
        kind["groups"] = groups
        if words:
            kind.pop("lost")  # a file records losses only for the whole recording
    return kinds


def test_the_table_contains_every_sample_and_span_link(engine, stored):
    columns = "sum(length(TimestampsUnixNano)), sum(arraySum(Values)), countIf(SpanId != '')"
    ((times, values, links),) = engine.ask(f"SELECT {columns} FROM {TABLE}")
    windows = [window(number) for number in range(WINDOWS)]
    samples = [one for each in windows for _, one in each.samples]
    assert int(times) == SAMPLES
    assert int(values) == sum(sum(sample.values) for sample in samples)
    assert int(links) == sum(sample.link is not None for sample in samples)


@pytest.mark.parametrize("words", FILTERS, ids=" ".join)
def test_report_output_is_the_same_for_a_clickhouse_table_and_a_file(engine, stored, words):
    times = [] if "--from" in words else ALL_TIMES
    for by in ("function", "process", "span"):
        of_file = report(*words, "--by", by, stored)
        of_table = report(*words, *times, "--by", by, engine.address())
        assert sum(kind["samples"] for kind in of_file) > 0
        assert comparable(of_table, words) == comparable(of_file, words)


@pytest.mark.parametrize("by", [*GROUPINGS, "host.name", "tenant.none", "label:tenant"])
def test_reports_from_a_clickhouse_table_and_a_file_match_for_every_grouping(engine, stored, by):
    of_file = report("--by", by, stored)
    assert comparable(report(*ALL_TIMES, "--by", by, engine.address())) == comparable(of_file)
    assert {kind["kind"]: kind["lost"] for kind in of_file}.items() <= LOST.items()


def test_span_parts_from_a_clickhouse_table_match_those_from_a_file(engine, stored):
    of_file = json.loads(run("report", "--json", "--by", "part", stored))
    words = ["--json", "--by", "part", *ALL_TIMES, engine.address()]
    assert json.loads(run("report", *words)) == of_file
    assert of_file["traces"] > 0
    assert {"kernel", "wait: run_queue"} <= {group["name"] for group in of_file["groups"]}


def test_callers_and_callees_from_a_clickhouse_table_match_those_from_a_file(engine, stored):
    for option in ("--callers", "--callees"):
        of_file = report(option, "ksys_read", stored)
        of_table = report(option, "ksys_read", *ALL_TIMES, engine.address())
        assert comparable(of_table) == comparable(of_file)


def sampled(data):
    """Returns a page's sample counts by stack, thread, CPU, kind and time bin."""
    strings, frames, nodes = data["strings"], data["frames"], data["nodes"]

    def path(node):
        while node >= 0:
            at = nodes["frame"][node]
            name, of = strings[frames["name"][at]], strings[frames["module"][at]]
            yield ("nameless" if strings[frames["reason"][at]] else name), of, frames["kind"][at]
            node = nodes["parent"][node]

    samples, result = data["samples"], Counter()
    for node, thread, cpu, kind, place, count in zip(
        *(samples[name] for name in ("node", "thread", "cpu", "kind", "bin", "count")), strict=True
    ):
        name, tid = data["threads"]["name"][thread], data["threads"]["tid"][thread]
        result[tuple(path(node)), strings[name], tid, cpu, data["kinds"][kind]["name"], place] += (
            count
        )
    return result


def test_pages_from_a_clickhouse_table_and_a_file_are_identical(engine, stored, tmp_path):
    pages = []
    for name, source, times in (("a", engine.address(), ALL_TIMES), ("b", stored, [])):
        path = tmp_path / f"{name}.html"
        run("report", *times, source, "-o", path)
        pages.append(page.data(path.read_text()))
    assert sampled(pages[0]) == sampled(pages[1])
    assert pages[0]["summary"] == pages[1]["summary"]


def test_view_shows_profiles_from_a_clickhouse_table(engine, stored):
    words = [*COMMAND, "view", "--no-browser", "--service", "shop", *ALL_TIMES, engine.address()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        try:
            address = re.search(r"http://\S+", command.stdout.readline())[0]
            with urllib.request.urlopen(f"{address}profile.json", timeout=60) as answer:
                data = page.unpacked(json.load(answer))
        finally:
            command.kill()
    of_file = report("--service", "shop", "--by", "process", stored)
    (on_cpu,) = [kind for kind in of_file if kind["kind"] == "on_cpu"]
    assert sum(n for key, n in sampled(data).items() if key[4] == "on_cpu") == on_cpu["samples"]
    assert data["title"].startswith("otel")


def newest(engine, seconds, service):
    """Returns the data source through which ``top`` reads the last few seconds of the table."""
    chosen = Filter(services=(service,))
    end = START + WINDOWS * SECOND
    return Table(engine.address(), chosen, ON_CPU, seconds, idle=True, now=lambda: end)


@pytest.mark.parametrize("by", ["function", "process", "syscall", "thread"])
def test_top_shows_the_last_few_seconds_of_a_clickhouse_table(engine, stored, by):
    seconds = 11
    with newest(engine, seconds, "shop") as table:
        table.start()
        wait_until(table.step, PATIENCE_S)
        shown = table.shown()
    words = ["--service", "shop", "--kind", "on_cpu", "--by", by, "-n", "0"]
    (reported,) = report(*words, "--from", f"{WINDOWS - seconds}s", engine.address())
    groups = Counter({group.key.name: group.own for group in shown.groups(View(by))})
    assert sum(groups.values()) == shown.weight > 0
    expected = Counter()
    for group in reported["groups"]:
        expected[group["name"]] += group["self"]
    assert +groups == +expected
    assert (shown.samples, shown.seconds) == (reported["samples"], seconds)


def test_top_keeps_samples_while_clickhouse_is_unresponsive(engine, stored, monkeypatch, caplog):
    def refuse(*_):
        raise KProfilerError("no answer")

    with newest(engine, 11, "shop") as table:
        table.start()
        wait_until(table.step, PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(ProfileStore, "read", refuse)
            while not table.status.is_stale:
                wait_until(table.step, PATIENCE_S)
            before = table.shown()
            wait_until(table.step, PATIENCE_S)
            assert table.shown() is before
            assert before.samples
        while table.status.is_stale:
            wait_until(table.step, PATIENCE_S)
        assert table.shown().samples == before.samples
    reported = [
        record.getMessage() for record in caplog.records if record.name == top_table.__name__
    ]
    assert reported == ["no answer"]


def test_top_exits_if_its_first_read_from_a_table_fails(engine, stored):
    assert "none" in run("top", "--once", "--from", f"{engine.address()}?table=none", status=1)


@pytest.mark.long
def test_diff_compares_services_and_time_ranges_of_a_clickhouse_table(engine, stored, tmp_path):
    sides = [f"{engine.address()}?service.name={name}" for name in ("shop", "shipping")]
    times = [f"--time-{side}=0s..{WINDOWS}s" for side in ("before", "after")]
    for kind in json.loads(run("diff", "--json", *times, *sides))["kinds"]:
        for side, name in (("before", "shop"), ("after", "shipping")):
            (same,) = [
                one
                for one in report("--service", name, "--by", "kind", stored)
                if one["kind"] == kind["kind"]
            ]
            assert kind[side]["samples"] == same["samples"]
    halves = [f"--time-before=0s..{WINDOWS // 2}s", f"--time-after={WINDOWS // 2}s..{WINDOWS}s"]
    of_table, of_file = (
        json.loads(run("diff", "--json", "--by", "process", *halves, source))["kinds"]
        for source in (engine.address(), stored)
    )
    for kind in (*of_table, *of_file):
        kind["before"].pop("start_unix_ns")  # for a file, this is the time of the first sample
        kind["groups"] = {one["name"]: one["self"]["change"] for one in kind["groups"]}
    assert [kind["after"]["samples"] for kind in of_table] == [
        kind["after"]["samples"] for kind in of_file
    ]
    path = tmp_path / "change.html"
    run("diff", "-o", path, *times, *sides)
    assert "service.name=shop" in page.data(path.read_text())["parts"][0]["name"]


def test_timestamps_are_rounded_if_there_are_too_many_samples(engine, stored, monkeypatch):
    said, read = [], []
    chosen = Selection(Filter(), Range(START, START + WINDOWS * SECOND))
    with closing(ProfileStore(parse_address(engine.address(), {}))) as profiles:
        for most in (store.EXACT_TIMES, 100):
            monkeypatch.setattr(store, "EXACT_TIMES", most)
            read.append(profiles.read(chosen, ALL, said.append))
    exact, merged = read
    assert len(said) == 1
    assert "timestamps are rounded to steps of" in said[0]
    assert len(set(merged.times)) < len(set(exact.times))
    assert exact.count == merged.count == SAMPLES
    assert sum(exact.weights()) == sum(merged.weights())
    groups = [
        {group_sample.key: group_sample for group_sample in group_samples(samples, "function")}
        for samples in read
    ]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ("module", "limit"), [(rows, "MAX_ROWS"), (rows, "MAX_TIMES"), (store, "MAX_STACKS")]
)
def test_more_samples_than_fit_into_memory_are_rejected(engine, stored, monkeypatch, module, limit):
    monkeypatch.setattr(module, limit, 2)
    chosen = Selection(Filter(), Range(START, START + WINDOWS * SECOND))
    with (
        closing(ProfileStore(parse_address(engine.address(), {}))) as profiles,
        pytest.raises(KProfilerError, match="more than 2 ") as raised,
    ):
        profiles.read(chosen, ALL, pytest.fail)
    assert "narrow the query" in raised.value.hint


def test_report_merges_a_clickhouse_table_and_a_file(engine, stored):
    both = report("--idle", *ALL_TIMES, "--by", "kind", engine.address(), stored)
    assert sum(kind["samples"] for kind in both) == 2 * SAMPLES


def test_clickhouse_errors_state_the_cause_and_a_fix_but_not_the_password(engine, stored):
    (free,) = free_ports(1)
    refused = run("report", f"clickhouse://{USER}:{PASSWORD}@127.0.0.1:{free}/otel", status=1)
    reason = f"error: cannot read clickhouse://127.0.0.1:{free}/otel: Connection refused\n"
    assert refused.startswith(f"{reason}fix: use the port of the HTTP interface")
    no_table = run("report", engine.address("default"), status=1)
    assert "exporter" in no_table
    assert "fix: use the database" in no_table
    no_database = run("report", engine.address("nothing"), status=1)
    assert "fix: use the database that the Collector" in no_database
    wrong = run("report", engine.address(user=f"{USER}:wr0ng-word@"), status=1)
    assert "Authentication failed" in wrong
    assert "fix: specify the user" in wrong
    for text in (refused, no_table, no_database, wrong):
        assert PASSWORD not in text
        assert "wr0ng-word" not in text
        assert "Traceback" not in text
    environ = {"CLICKHOUSE_USER": USER, "CLICKHOUSE_PASSWORD": PASSWORD}
    assert f"{SAMPLES - OFF_CPU_SAMPLES:,} samples" in run(
        "report", *ALL_TIMES, engine.address(), environ=environ
    )


def test_the_last_hour_is_reported_by_default_even_if_it_contains_no_samples(engine, stored):
    done = run_checked("report", engine.address())
    assert "the last hour" in done.stderr
    assert "no matching samples" in done.stderr
    assert done.stdout == "no samples\n"


AGENT = """
receivers:
  kprofiler:
    samples_per_second: 99
    stacks: both
    user_symbols: names
    self_profiled: mark
    reporter_interval: 1s
exporters:
  otlp_grpc: {{endpoint: "{endpoint}", tls: {{insecure: true}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}
"""


RECIPES = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.parametrize("query", RECIPES, ids=range(len(RECIPES)))
def test_documented_queries_return_the_expected_rows(engine, stored, query):
    assert "Timestamp > now() - INTERVAL 1 " in query
    rows = engine.ask(query.replace("now()", f"toDateTime({START // SECOND + WINDOWS})"))
    assert rows
    if "AS twice" in query:
        assert rows == [["0"]]
    if "AS taken" in query:
        assert sum(int(taken) for _, taken, _ in rows) == 108 * WINDOWS


@pytest.mark.parametrize("name", ["agent", "gateway-clickhouse", "gateway-pyroscope"])
def test_the_collector_accepts_the_shipped_configurations(collector_program, name):
    command = [collector_program, "validate", f"--config={CONFIG / f'{name}.yaml'}", GATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def own(kinds):
    """Returns self weights by function and module, ignoring details that are not in the table."""
    results = Counter()
    for group in kinds[0]["groups"]:
        nameless = group["name"] in REASONS or group["name"].startswith("fun_")
        place = (group["place"] or "").partition(" [")[0]  # without the suffix of built-in modules
        results["" if nameless else group["name"], place] += group["self"]
    return results


@pytest.mark.live
def test_a_report_from_clickhouse_counts_every_sample_from_the_agent(
    engine, stored, collector_program, tmp_path, sampling_host
):
    began = datetime.fromtimestamp(time.time() - 1, tz=UTC).isoformat()
    with gateway(collector_program, engine, tmp_path) as (grpc, _, file):
        with Agent(tmp_path, AGENT.format(endpoint=grpc.removeprefix("grpc://"))) as agent:
            agent.wait_until_it_samples()
            load = "import time\nend = time.time() + 1\nwhile time.time() < end: pass"
            subprocess.run([sys.executable, "-c", load], check=True)
            account = agent.stop()
        sent = account["exporters"]["otlp_grpc"]
        lost = sum(account["lost"].values()) + sum(sent["lost"].values())
        assert sent["exported"] == account["taken"] - lost > 0, f"{account}\n{agent.log}"
        engine.wait_for(SAMPLES + sent["exported"])
    for by in ("process", "syscall", "line", "cpu"):
        of_table = report("--from", began, "--by", by, engine.address())
        assert of_table == report("--by", by, file)
        assert of_table[0]["samples"] == sent["exported"]
    assert own(report("--from", began, engine.address())) == own(report(file))
    words = ["--once", "--by", "process", "-n", "1000", "--window", "10m"]
    head, _, *rows = run("top", *words, "--from", engine.address()).splitlines()
    assert head.startswith("clickhouse://127.0.0.1:")
    (of_file,) = report("--by", "process", file)
    weights = [one["self"] for one in of_file["groups"]]
    expected = [f"{weight / sum(weights):.1%}" for weight in weights]
    assert sorted(row.split()[0] for row in rows if row) == sorted(expected)
