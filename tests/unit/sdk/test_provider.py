"""Tests the provider, processors, exporters and settings without sampling."""

import gc
import io
import json
import multiprocessing.util
import threading
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.resources import Resource as SdkResource

from otel_kprofiler.errors import ConfigError, ExportError
from otel_kprofiler.export import ClientSettings, ExportResult, ProfileExporter, RetryPolicy, Tls
from otel_kprofiler.model import KERNEL_SIDE, Form, Frame, LossCause, SpanLink, Stack, WindowSample
from otel_kprofiler.sdk import (
    BatchProfileProcessor,
    ConsoleProfileExporter,
    InMemoryProfileExporter,
    KernelProfiler,
    ProfileProcessor,
    ProfilerProvider,
    SimpleProfileProcessor,
    provider,
)
from otel_kprofiler.sdk.declarative import read_configuration_file
from otel_kprofiler.sdk.exporters import find_exporters
from otel_kprofiler.sdk.resource import plain_attributes
from otel_kprofiler.sdk.schema import read_settings
from tests.commands import run_python
from tests.raising import raising
from tests.windows import make_window


def window(samples=3):
    stack = Stack.from_frames((Frame(None, 1, (), 0, KERNEL_SIDE),))
    sample = WindowSample(
        stack, 1, "t", 0, SpanLink(b"\1" * 16, b"\2" * 8), tuple(range(10, 10 + samples))
    )
    return make_window(0, 100, ({"service.name": "svc"}, [sample]), taken=samples)


@pytest.fixture
def in_memory():
    return InMemoryProfileExporter()


def test_a_provider_that_was_shut_down_leaves_nothing_registered_for_exit():
    before = len(multiprocessing.util._finalizer_registry)
    ProfilerProvider().shutdown()
    gc.collect()
    assert len(multiprocessing.util._finalizer_registry) == before


@pytest.mark.parametrize("processor", [BatchProfileProcessor, SimpleProfileProcessor])
def test_a_flush_exports_all_earlier_windows(processor, in_memory):
    profiles = ProfilerProvider(shutdown_on_exit=False)
    profiles.add_profile_processor(processor(in_memory))
    profiles.on_window(window(3))
    profiles.on_window(window(4))
    assert profiles.force_flush(10_000)
    exported = in_memory.get_finished_windows()
    assert sum(window.sample_count for window in exported) == 7
    assert exported[0].profiles[0].resources[0].samples[0].link == SpanLink(b"\1" * 16, b"\2" * 8)
    (account,) = profiles.accounts()
    assert (account.exported, account.pending, account.lost) == (7, 0, {})
    in_memory.clear()
    profiles.shutdown(10_000)
    profiles.shutdown(10_000)
    profiles.on_window(window())
    assert in_memory.get_finished_batches() == ()


def test_a_failing_processor_does_not_affect_other_processors(in_memory, caplog):
    class Broken(ProfileProcessor):
        def on_window(self, window):
            raise RuntimeError("broken")

        def shutdown(self, timeout_millis=30_000):
            pass

    profiles = ProfilerProvider(shutdown_on_exit=False)
    profiles.add_profile_processor(Broken())
    profiles.add_profile_processor(SimpleProfileProcessor(in_memory))
    profiles.on_window(window())
    assert len(in_memory.get_finished_batches()) == 1
    assert "a processor failed" in caplog.text
    profiles.shutdown()


@pytest.mark.parametrize("processor", [BatchProfileProcessor, SimpleProfileProcessor])
@pytest.mark.parametrize("export", [raising(ValueError("broken")), lambda _: None])
def test_samples_that_a_broken_exporter_does_not_account_for_are_lost(
    processor, export, in_memory, caplog, monkeypatch
):
    monkeypatch.setattr(in_memory, "export", export)
    profiles = ProfilerProvider(shutdown_on_exit=False)
    profiles.add_profile_processor(processor(in_memory))
    profiles.on_window(window(3))
    assert profiles.force_flush(10_000)
    (account,) = profiles.accounts()
    assert (account.exported, account.lost) == (0, {LossCause.INTERNAL: 3})
    assert "in_memory: the exporter raised an exception" in caplog.text
    profiles.shutdown()


def test_a_hanging_exporter_delays_neither_callers_nor_shutdown():
    class Hanging(ProfileExporter):
        form, max_bytes, name = Form.PROTOBUF, None, "hanging"

        def __init__(self):
            self.stop = threading.Event()

        def export(self, batch):
            self.stop.wait()
            return ExportResult.failure(batch, LossCause.SHUTDOWN, "stopped")

        def shutdown(self, timeout_millis=30_000):
            self.stop.set()

    profiles = ProfilerProvider(shutdown_on_exit=False)
    profiles.add_profile_processor(BatchProfileProcessor(Hanging(), max_queue_size=2))
    started = time.monotonic()
    for _ in range(5):
        profiles.on_window(window(1))
    assert not profiles.force_flush(100)
    profiles.shutdown(200)
    assert time.monotonic() - started < 20
    (account,) = profiles.accounts()
    assert sum(account.lost.values()) == 5
    assert account.lost.keys() == {LossCause.SHUTDOWN, LossCause.QUEUE_FULL}


def test_a_forked_child_opens_its_own_exporter():
    made = []

    def factory():
        made.append(InMemoryProfileExporter())
        return made[-1]

    processor = BatchProfileProcessor(factory)
    processor.after_fork_in_child()
    processor.on_window(window(2))
    assert processor.force_flush(5000)
    processor.shutdown()
    assert [len(one.get_finished_batches()) for one in made] == [0, 1]
    silent = BatchProfileProcessor(InMemoryProfileExporter())
    silent.after_fork_in_child()
    silent.on_window(window(3))
    (account,) = silent.accounts()
    assert (account.exported, account.not_offered) == (0, 3)


@pytest.mark.parametrize("error", [ExportError("no file", hint="chmod o+r ca.pem"), OSError()])
def test_samples_that_a_forked_child_cannot_export_are_counted(error, caplog):
    made, errors = [], iter([None, error, error])

    def factory():
        if problem := next(errors, None):
            raise problem
        made.append(InMemoryProfileExporter())
        return made[-1]

    profiles = ProfilerProvider(shutdown_on_exit=False)
    profiles.add_profile_processor(BatchProfileProcessor(factory))
    profiles.after_fork_in_child()
    for exported in (0, 0, 3):
        profiles.on_window(window(3))
        assert profiles.force_flush(60_000)
        (account,) = profiles.accounts()
        assert account.exported == exported
        assert {"on_cpu": account.exported + account.not_offered} == profiles.handed_over
    assert caplog.text.count("a forked child exports no samples") == isinstance(error, ExportError)
    (arrived,) = made[-1].get_finished_windows()
    assert arrived.sample_count == 3
    profiles.shutdown(0)


def test_the_console_exporter_prints_otlp_json():
    out = io.StringIO()
    processor = SimpleProfileProcessor(ConsoleProfileExporter(out))
    processor.on_window(window())
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["resourceProfiles"]
    out.close()
    processor.on_window(window(2))
    (account,) = processor.accounts()
    assert account.lost == {LossCause.WRITE_FAILED: 2}


def test_the_global_provider_can_be_set_only_once(monkeypatch, caplog):
    monkeypatch.setattr(provider, "_global", None)
    first, second = (ProfilerProvider(shutdown_on_exit=False) for _ in range(2))
    provider.set_profiler_provider(first)
    provider.set_profiler_provider(second)
    assert provider.get_profiler_provider() is first
    assert "not allowed" in caplog.text


@pytest.mark.system
@pytest.mark.parametrize("first", ["traces", "metrics", "nothing"])
def test_profiles_have_the_same_resource_as_traces_and_metrics(first):
    code = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import ProfilerProvider
if FIRST == "traces":
    trace.set_tracer_provider(TracerProvider(resource=Resource.create({"service.name": "t"})))
if FIRST != "nothing":
    metrics.set_meter_provider(MeterProvider(resource=Resource.create({"service.name": "m"})))
print(ProfilerProvider().resource.attributes["service.name"])
"""
    output = run_python(f"FIRST = {first!r}\n{code}", env={"OTEL_SERVICE_NAME": "e"})
    # As in the SDK, the environment provides the name if no other name is set.
    assert output.strip() == {"traces": "t", "metrics": "m", "nothing": "e"}[first]


def test_an_explicit_resource_is_used_unchanged():
    resource = SdkResource({"service.name": "given"})
    assert ProfilerProvider(resource, shutdown_on_exit=False).resource is resource


OVER_HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["otlp_grpc"]),
        ({"OTEL_PROFILES_EXPORTER": "none"}, []),
        ({"OTEL_PROFILES_EXPORTER": "console, otlp_json_file"}, ["console", "file"]),
        (OVER_HTTP, ["otlp_http"]),
        ({"OTEL_EXPORTER_OTLP_PROFILES_PROTOCOL": "http/json"}, ["otlp_http"]),
        ({"OTEL_PROFILES_EXPORTER": "otlp_proto_grpc", **OVER_HTTP}, ["otlp_grpc"]),
        ({"OTEL_PROFILES_EXPORTER": "otlp_proto_http"}, ["otlp_http"]),
    ],
)
def test_exporter_names_match_those_for_other_signals(environ, names, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    exporters = [factory() for factory in find_exporters(environ)]
    assert [exporter.name for exporter in exporters] == names
    for exporter in exporters:
        exporter.shutdown(0)


def test_the_error_for_a_missing_exporter_lists_the_installed_exporters():
    with pytest.raises(ConfigError, match="no exporter 'otpl'") as raised:
        find_exporters({"OTEL_PROFILES_EXPORTER": "otpl"})
    assert "otlp_proto_grpc" in raised.value.hint


def test_all_invalid_environment_settings_are_reported_together():
    settings = read_settings(
        {
            "OTEL_KPROFILER_SAMPLES_PER_SECOND": "99",
            "OTEL_KPROFILER_STACKS": "Both",
            "OTEL_KPROFILER_TARGET": "children",
            "OTEL_KPROFILER_SPAN_LINKS": "FALSE",
            "OTEL_KPROFILER_REPORTER_INTERVAL": "1m30s",
            "OTEL_KPROFILER_REPORTER_JITTER": "0",
            "OTEL_KPROFILER_PIN_CPU_IDS": "",
            "OTEL_SERVICE_NAME": "svc",
        }
    )
    assert (settings.samples_per_second, settings.stacks, settings.target) == (
        99, "both", "children",
    )  # fmt: skip
    assert settings.span_links is False
    assert settings.reporter_interval.seconds == 90
    assert read_settings({"OTEL_KPROFILER_TARGET_PIDS": "1, 23"}).target_pids == [1, 23]


WRONG = {
    "OTEL_KPROFILER_STACKS": "x",
    "OTEL_KPROFILER_TARGET": "everything",
    "OTEL_KPROFILER_SAMPLES_PER_SECOND": "many",
    "OTEL_KPROFILER_TARGET_PIDS": "1,x",
    "OTEL_PROFILES_EXPORTER": "otpl,otlp,nowhere",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "udp",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "soon",
}
UNKNOWN = {"OTEL_KPROFILER_STACK": "both", "OTEL_KPROFILER_TRACERS": "all"}


def test_invalid_environment_variables_cause_a_single_warning_and_the_service_continues(caplog):
    profiler = KernelProfiler.from_env(WRONG | UNKNOWN).start()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for name in WRONG | UNKNOWN:
        assert f" {name}: " in record.message
    assert "'otpl'" in record.message
    assert "'nowhere'" in record.message
    assert profiler.stats()["state"] == "stopped"
    assert "OTEL_KPROFILER_STACKS" in profiler.stats()["problem"]
    profiler.stop()


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_environment_variable_raises_an_error_if_requested(name, caplog):
    with pytest.raises(ConfigError, match=name):
        KernelProfiler.from_env({name: WRONG[name]}).start("raise")
    assert caplog.records == []


def test_unknown_variables_are_ignored_with_a_single_warning(caplog):
    KernelProfiler.from_env({"OTEL_PROFILES_EXPORTER": "console"} | UNKNOWN)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "did you mean OTEL_KPROFILER_STACKS?" in record.message
    assert "OTEL_KPROFILER_TRACERS: Python frames are unwound" in record.message
    assert "; remove this setting" in record.message


def test_invalid_declarative_configuration_causes_one_warning(caplog):
    profiler = KernelProfiler.from_options(
        {"stacks": "x", "taget": "self"}, environ={"OTEL_PROFILES_EXPORTER": "otpl"}
    )
    profiler.start()
    (record,) = caplog.records
    for mistake in ("stacks", "taget", "'otpl'"):
        assert mistake in record.message


PLAIN = ClientSettings(compression="none", retry=RetryPolicy(max_elapsed_time_s=10))
CONFIGURED = {
    """tracer_provider: {processors: [{batch: {exporter: {otlp_http: {
      endpoint: 'http://there:4318/v1/traces', timeout: 2500, compression: gzip,
      headers: [{name: Key, value: secret}], headers_list: 'other=1'}}}}]}""": ClientSettings(
        protocol="http/protobuf",
        endpoint="http://there:4318",
        headers={"key": "secret", "other": "1"},
        timeout_s=2.5,
        retry=RetryPolicy(max_elapsed_time_s=2.5),
    ),
    """tracer_provider: {processors: [{simple: {exporter: {console: {}}}}]}
logger_provider: {processors: [{simple: {exporter: {otlp_http: {
      endpoint: 'https://there/prefix/v1/logs', encoding: json,
      tls: {ca_file: /ca}}}}}]}""": replace(
        PLAIN, protocol="http/json", endpoint="https://there/prefix", tls=Tls(ca_file="/ca")
    ),
    """meter_provider: {readers: [{periodic: {exporter: {otlp_grpc: {
      endpoint: 'there:4317', tls: {insecure: true}}}}}]}""": replace(
        PLAIN, endpoint="there:4317", tls=Tls(insecure=True)
    ),
    "tracer_provider: {processors: [{batch: {exporter: {otlp_grpc: {}}}}]}": PLAIN,
    "tracer_provider: {processors: [{batch: {exporter: {console: {}}}}]}": None,
}


@pytest.mark.parametrize("text", CONFIGURED)
def test_declarative_configuration_sends_profiles_to_the_receiver_for_other_signals(text, tmp_path):
    path = tmp_path / "sdk.yaml"
    path.write_text(f"file_format: '1.1'\n{text}\n")
    assert read_configuration_file({"OTEL_CONFIG_FILE": str(path)}) == CONFIGURED[text]


def test_list_valued_resource_attributes_keep_their_element_types():
    given = {"ports": (80, 443), "flags": [True], "shares": (0.5,), "names": ("a",), "one": 1}
    assert plain_attributes(SdkResource(given).attributes) == {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
