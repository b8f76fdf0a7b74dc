"""Exporters and their queues survive reloads."""

from dataclasses import dataclass

import pytest
from pydantic import Field

from docs.configuration_files import json_schema
from otel_kprofiler.agent import agent_config
from otel_kprofiler.agent.leftovers import Leftovers
from otel_kprofiler.agent.running_exporters import open_changed, put_in_place
from otel_kprofiler.config import EXPORTERS, Exporter, PendingConfig, parse_config
from otel_kprofiler.errors import ConfigError
from otel_kprofiler.export import ExporterSettings, ExportResult, ProfileExporter
from otel_kprofiler.model import AttributeForm, Form, Stack, WindowSample
from otel_kprofiler.otlp import encode_window
from tests.servers import serve_grpc
from tests.windows import make_window

pytestmark = pytest.mark.system

CONFIG = """
receivers: {{kprofiler: {{}}}}
exporters:
  otlp_grpc:
    endpoint: "{endpoint}"
    tls: {{insecure: true}}
    attributes: {attributes}
    sending_queue: {{storage: "{storage}"}}
    retry_on_failure: {{initial_interval: 10ms, max_interval: 50ms}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [otlp_grpc]}}}}}}
"""


@pytest.fixture
def receiver():
    requests = []

    def export(request, context):
        requests.append(request)
        return b""

    server, port = serve_grpc(export)
    yield f"127.0.0.1:{port}", requests
    server.stop(0).wait()


def make_batch(queue, pid):
    sample = WindowSample(Stack(()), 1, "main", 0, None, [pid])
    group = {"process.pid": pid, "process.executable.name": f"program-{pid}"}, [sample]
    window = make_window(pid, pid + 1, group)
    (batch,) = encode_window(window, **queue.exporter.encoding._asdict()).batches
    return batch


@pytest.mark.parametrize("stored", [False, True])
def test_queued_batches_keep_their_encoding_across_a_reload(receiver, tmp_path, stored):
    endpoint, requests = receiver
    running, batches = {}, []
    for pid, (address, form) in enumerate(
        [("127.0.0.1:1", "references"), (endpoint, "inline")], start=1
    ):
        storage = tmp_path / "spool" if stored else ""
        text = CONFIG.format(endpoint=address, attributes=form, storage=storage)
        wanted = parse_config(text, path="agent.yaml", environ={}).config.running_exporters
        running = put_in_place(running, wanted, open_changed(running, wanted), lambda *_: None)
        queue = running["otlp_grpc"].queue
        assert queue.exporter.attributes is AttributeForm(form)
        batches.append(make_batch(queue, pid))
        queue.put(batches[-1])
    assert queue.force_flush(30_000)
    assert requests == [batch.payload for batch in batches]
    assert queue.counts().exported == 2
    queue.shutdown(1000)


def test_spools_that_no_exporter_delivers_are_reported_once(tmp_path, caplog):
    def configure(name):
        text = CONFIG.format(endpoint="127.0.0.1:1", attributes="inline", storage=tmp_path)
        text = text.replace("otlp_grpc", name)
        return agent_config(parse_config(text, path="agent.yaml", environ={}).config).exporters

    def look(name):
        leftovers.look(configure(name)).join()
        return list(leftovers.problems)

    old = configure("otlp_grpc/old")
    running = put_in_place({}, old, open_changed({}, old), lambda *_: None)
    queue = running["otlp_grpc/old"].queue
    queue.put(make_batch(queue, 7))
    for name in ("delivered", "foreign"):
        old["otlp_grpc/old"].queue.spool.open(name).close()
    (tmp_path / "foreign").chmod(0o777)
    (tmp_path / "file").write_text("")
    leftovers = Leftovers()
    assert not look("otlp_grpc/new"), "the removed exporter is still delivering"
    queue.shutdown(0)
    caplog.clear()
    for name, expected in (("new", ["otlp_grpc/old"]), ("other", ["otlp_grpc/old"]), ("old", [])):
        assert look(f"otlp_grpc/{name}") == expected
    (message,) = caplog.messages
    assert message == (
        f"the spool {tmp_path}/otlp_grpc%2Fold holds 1 sample, but no exporter is named"
        " otlp_grpc/old and uses it. To deliver the samples, add this exporter again; to give them"
        " up, remove the directory"
    )
    again = open_changed({}, old)["otlp_grpc/old"]
    assert len(again.spool.waiting) == 1
    again.close()


class Tally(Exporter):
    path: str = Field(description="File to append to.")

    def settings(self):
        return TallySettings(path=self.path)


@dataclass(frozen=True, kw_only=True)
class TallySettings(ExporterSettings):
    path: str

    def open(self, name):
        return TallyExporter(name, self.path)


class TallyExporter(ProfileExporter):
    form = Form.JSON
    max_bytes = None

    def __init__(self, name, path):
        self.name = name
        self.path = path

    def export(self, batch):
        with open(self.path, "a") as file:
            file.write(f"{self.name}: {batch.sample_count}\n")
        return ExportResult.success(batch)

    def shutdown(self, timeout_millis=0):
        pass


def test_a_new_exporter_needs_only_a_row_in_the_exporter_table(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPORTERS, "tally", Tally)
    path = tmp_path / "agent.yaml"
    path.write_text(f"""
receivers: {{kprofiler: {{}}}}
exporters: {{tally/mine: {{path: "{tmp_path}/out"}}}}
service: {{pipelines: {{profiles: {{receivers: [kprofiler], exporters: [tally/mine]}}}}}}
""")
    read = lambda: PendingConfig(str(path), agent_config, fork=True).get().exporters  # noqa: E731
    wanted = read()
    placed = put_in_place({}, wanted, open_changed({}, wanted), lambda *_: None)
    assert not open_changed(placed, read()), "nothing changed"
    queue = placed["tally/mine"].queue
    queue.put(make_batch(queue, 7))
    assert queue.force_flush(30_000)
    queue.shutdown(1000)
    assert (tmp_path / "out").read_text() == "tally/mine: 1\n"
    path.write_text(path.read_text().replace("path:", "paht:"))
    with pytest.raises(ConfigError, match="did you mean path"):
        read()
    schema = json_schema()
    assert schema["$defs"]["Tally"]["required"] == ["path"]
    assert any("tally" in name for name in schema["properties"]["exporters"]["patternProperties"])
