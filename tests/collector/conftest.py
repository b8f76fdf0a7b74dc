"""Real OpenTelemetry Collectors, built once per version with Go and started for each test.

The OpenTelemetry Collector Builder builds Collectors from the manifests in this directory and
modules from the Go module proxy. The binaries are cached in ``~/.cache/otel-kprofiler``, or in
``$OTEL_KPROFILER_CACHE``. All Collector traffic stays on the loopback interface.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache import cache_directory
from tests.collector.go_tools import BUILD_SECONDS, build_once
from tests.further import further
from tests.processes import LoggedProcess
from tests.servers import HttpServer, free_ports

VERSIONS = ("0.161.0", "0.159.0")
"""Collector versions with all components that the tests need; the first supports ClickHouse."""
NEWEST = "0.165.0"
"""The newest Collector. Its file exporter does not compile; tests use ``FileReceiver`` instead."""
ALL_VERSIONS = (NEWEST, *VERSIONS)
GATE = "--feature-gates=service.profilesSupport"
HERE = Path(__file__).parent

CONFIG = """
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: "127.0.0.1:{grpc}", keepalive: {{server_parameters: {{{keepalive}}}}}}}
      http: {{endpoint: "127.0.0.1:{http}"}}
processors:
  resource:
    attributes:
      - {{key: service.copy, from_attribute: service.name, action: insert}}
      - {{key: process.pid, action: delete}}
  {processors}
exporters:
  debug:
  debug/detailed: {{verbosity: detailed}}
  file: {{path: "{output}", flush_interval: 50ms}}
  file/traces: {{path: "{traces}", flush_interval: 50ms}}
  file/metrics: {{path: "{metrics}", flush_interval: 50ms}}
  {exporters}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    {pipeline}
"""
PROFILES = """
    profiles: {receivers: [otlp], exporters: [file, debug]}
    traces: {receivers: [otlp], exporters: [file/traces]}
    metrics: {receivers: [otlp], exporters: [file/metrics]}
"""
PROCESSED = (
    "profiles: {receivers: [otlp], processors: [resource], exporters: [file, debug/detailed]}"
)
TRACES_ONLY = "traces: {receivers: [otlp], exporters: [debug]}"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.collector)
            # The first test of each version waits until that version is built.
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


def pytest_collection_finish(session):
    """Builds missing Collectors while the first tests run."""
    wanted = any(HERE in item.path.parents for item in session.items)
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if not wanted or not is_first or session.config.option.collectonly:
        return
    if all(program_path(version).exists() for version in ALL_VERSIONS):
        return
    process = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, "-m", "tests.collector.conftest"],
        cwd=session.config.rootpath,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()

    session.config.add_cleanup(stop)


def read_manifest(version):
    return (HERE / f"builder-v{version}.yaml").read_text()


def program_path(version):
    digest = hashlib.sha256(read_manifest(version).encode()).hexdigest()[:12]
    return cache_directory() / f"otelcol-v{version}-{digest}"


def build(version):
    """Returns the path of a Collector binary, which is built if it is not cached."""
    builder = f"go.opentelemetry.io/collector/cmd/builder@v{version}"

    def commands(directory, program):
        config = Path(directory, "builder.yaml")
        config.write_text(
            read_manifest(version).replace("dist:\n", f"dist:\n  output_path: {directory}\n")
        )
        yield ["go", "run", builder, "--config", config]
        yield ["mv", Path(directory, "otelcol"), program]

    return build_once(program_path(version).name, commands)


class Collector(LoggedProcess):
    """A running Collector.

    Attributes:
        version: the version of the Collector, without ``v``.
        grpc_endpoint: the ``host:port`` of its OTLP/gRPC receiver, without TLS.
        http_endpoint: the base URL of its OTLP/HTTP receiver.
        output, traces, metrics: the files to which the Collector appends each request as OTLP JSON.
    """

    def __init__(
        self,
        version,
        directory,
        *,
        profiles=True,
        pipelines=PROFILES,
        exporters="",
        processors="",
        keepalive="",
    ):
        self.version = version
        self.output = directory / "profiles.jsonl"
        self.traces = directory / "traces.jsonl"
        self.metrics = directory / "metrics.jsonl"
        grpc, http = free_ports(2)
        self.grpc_endpoint = f"127.0.0.1:{grpc}"
        self.http_endpoint = f"http://127.0.0.1:{http}"
        config = directory / "collector.yaml"
        pipeline = pipelines if profiles else TRACES_ONLY
        files = {"output": self.output, "traces": self.traces, "metrics": self.metrics}
        settings = {"pipeline": pipeline, "exporters": exporters, "processors": processors, **files}
        text = CONFIG.format(grpc=grpc, http=http, keepalive=keepalive, **settings)
        self.files = None
        if "fileexporter" not in read_manifest(version):
            self.files = FileReceiver({"profiles": self.output, "traces": self.traces})
            text = self.files.replace_file_exporters(text)
        config.write_text(text)
        arguments = [build(version), "--config", config, *([GATE] if profiles else [])]
        super().__init__(arguments, directory / "collector.log")
        self.wait_for_line("Everything is ready")

    def requests(self, count):
        self.wait_until(lambda: self.output.read_bytes().count(b"\n") >= count)
        return self.arrived()

    def arrived(self):
        """Returns the requests in the file. Skips the last line if it is incomplete."""
        lines = self.output.read_bytes().splitlines(keepends=True) if self.output.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def stop(self):
        """Stops the Collector, which first flushes received data to its files."""
        super().stop()
        if self.files:
            self.files.close()


class FileReceiver(HttpServer):
    """An OTLP/HTTP receiver that appends each JSON request as a line to the file for its signal."""

    def __init__(self, paths):
        self.paths = paths
        for path in paths.values():
            path.touch()
        super().__init__(self._write)

    def _write(self, request):
        with open(self.paths[request.path.rpartition("/")[2]], "ab") as file:
            file.write(request.body + b"\n")
        request.reply(body=b"{}", Content_Type="application/json")

    def replace_file_exporters(self, config):
        settings = "compression: none, encoding: json, sending_queue: {enabled: false}"
        config = re.sub(
            r"^  file(/\w+)?: .*$",
            lambda match: (
                f"  otlp_http{match[1] or '/file'}: {{endpoint: '{self.url}', {settings}}}"
            ),
            config,
            flags=re.MULTILINE,
        )
        return re.sub(r"\bfile(/\w+)?(?=[,\]])", lambda m: f"otlp_http{m[1] or '/file'}", config)


@pytest.fixture
def collector_program():
    return build(VERSIONS[0])


@pytest.fixture
def open_collector(tmp_path_factory):
    started = []

    def start(version=VERSIONS[0], **options):
        directory = tmp_path_factory.mktemp(f"collector-v{version}-")
        started.append(Collector(version, directory, **options))
        return started[-1]

    yield start
    for collector in started:
        collector.stop()


@pytest.fixture(params=[NEWEST, *further(*VERSIONS)])
def collector(request, open_collector):
    """Starts a Collector with a profiles pipeline. ``make test-long`` tests every version."""
    return open_collector(request.param)


@pytest.fixture(params=[VERSIONS[0], *further(*VERSIONS[1:])])
def processing_collector(request, open_collector):
    """Starts a Collector that copies ``service.name`` and deletes ``process.pid``.

    The Collector's file exporter converts attributes back to references, so only the log shows the
    data that processors and other exporters receive.
    """
    return open_collector(request.param, pipelines=PROCESSED)


def resolve(request):
    """Yields every sample in a request, in the Collector's JSON form, with all references resolved.

    A sample is (resource attributes, kind, period, sample attributes, stack, link, timestamp). A
    stack is a sequence of (mapping file name, address, function names), leaf first. The code is
    independent of the package's decoder, so that the two cannot share a bug.
    """
    tables = request["dictionary"]

    def strings(index):
        return tables["stringTable"][index]

    def any_value(value):
        if "stringValueStrindex" in value:
            return strings(value["stringValueStrindex"])
        (kind, content), *rest = value.items()
        assert not rest
        return int(content) if kind == "intValue" else content

    def attribute(index):
        entry = tables["attributeTable"][index]
        return strings(entry["keyStrindex"]), any_value(entry["value"])

    def attributes(holder):
        pairs = [attribute(index) for index in holder.get("attributeIndices", [])]
        assert len(dict(pairs)) == len(pairs)
        return tuple(sorted(pairs))

    def frame(index):
        location = tables["locationTable"][index]
        mapping = tables["mappingTable"][location.get("mappingIndex", 0)]
        names = tuple(
            strings(tables["functionTable"][line["functionIndex"]]["nameStrindex"])
            for line in location.get("lines", [])
        )
        return strings(mapping.get("filenameStrindex", 0)), int(location.get("address", 0)), names

    def value_type(value):
        value = value or {}
        return strings(value.get("typeStrindex", 0)), strings(value.get("unitStrindex", 0))

    for group in request["resourceProfiles"]:
        resource = tuple(
            sorted(
                (
                    entry.get("key") or strings(entry.get("keyStrindex", 0)),
                    any_value(entry["value"]),
                )
                for entry in group["resource"].get("attributes", [])
            )
        )
        for scope in group["scopeProfiles"]:
            for profile in scope["profiles"]:
                kind = value_type(profile["sampleType"]) + value_type(profile.get("periodType"))
                for sample in profile["samples"]:
                    # placeholder sample in a window without samples
                    if "timestampsUnixNano" not in sample:
                        assert sample == {"values": ["0"]}, sample
                        continue
                    # OTLP JSON omits zero values. Stack 0 denotes a stack that was not captured.
                    stack = tables["stackTable"][sample.get("stackIndex", 0)]
                    frames = tuple(frame(index) for index in stack.get("locationIndices", ()))
                    link = tables["linkTable"][sample.get("linkIndex", 0)]
                    for timestamp in sample["timestampsUnixNano"]:
                        yield (
                            *(resource, kind, int(profile.get("period", 0))),
                            *(attributes(sample), frames),
                            (link.get("traceId", ""), link.get("spanId", "")),
                            int(timestamp),
                        )


@pytest.fixture
def samples_of():
    return lambda requests: [sample for request in requests for sample in resolve(request)]


if __name__ == "__main__":
    # exits cleanly, so that temporary files are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for each in ALL_VERSIONS:
        build(each)
