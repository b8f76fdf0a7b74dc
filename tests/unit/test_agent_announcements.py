"""The agent's sample counts and warnings are logged in the right format."""

import json
import logging

import pytest

from otel_kprofiler.agent.announcements import make_account_record
from otel_kprofiler.agent.logs import JsonFormatter, make_formatter
from otel_kprofiler.cli.doctor import conclude, describe
from otel_kprofiler.cli.receivers import open_receiver
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import OtlpGrpcExporter, OtlpHttpExporter, RetryPolicy
from otel_kprofiler.model import Account, Batch, ExporterAccount, Finding, Form, Level, LossCause
from tests.agents import parse_account
from tests.servers import HttpServer, serve_grpc

pytestmark = pytest.mark.system

DELIVERED = {
    "on_cpu": ExporterAccount("otlp_grpc", 70, {LossCause.REJECTED: 23}),
    "off_cpu": ExporterAccount("otlp_grpc", 11),
}
RECEIVER = ExporterAccount.of_kinds("otlp_grpc", DELIVERED)


def account(missed=0):
    on_cpu = Account(97, 93, {LossCause.RING_FULL: 4}, missed=missed)
    return Account.of_kinds({"on_cpu": on_cpu, "off_cpu": Account(11, 11)}, (RECEIVER,))


def test_sample_counts_are_logged_as_one_json_line_without_repeated_numbers():
    line = JsonFormatter().format(make_account_record(account(), as_json=True))
    assert "\n" not in line
    for number in ("97", "93", "70", "23"):
        assert line.replace(json.loads(line)["time"], "").count(number) == 1
    whole = parse_account(line)
    assert (whole["taken"], whole["exporters"]["otlp_grpc"]["exported"]) == (108, 81)
    assert whole["kinds"]["off_cpu"]["taken"] == 11


def test_a_text_log_shows_the_sample_counts_in_readable_form():
    line = make_formatter("console", 2).format(make_account_record(account(), as_json=False))
    assert line.partition("INFO    ")[2] == (
        "on_cpu: 97 samples taken; 4 lost (ring_full); otlp_grpc: 70 exported, 23 lost (rejected);"
        " off_cpu: 11 samples taken; otlp_grpc: 11 exported"
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_a_large_number_of_missed_ticks_is_explained(as_json):
    def line(missed):
        return JsonFormatter().format(make_account_record(account(missed), as_json=as_json))

    assert "missed" not in line(4), "a few per cent is what virtual machines miss"
    assert "31" in line(31)
    assert "runs another BPF program" in line(31)


@pytest.fixture(params=["grpc", "http"])
def plaintext(request):
    """Yields the protocol and port of a receiver that does not use TLS."""
    if request.param == "http":
        with HttpServer(None) as server:
            yield "http", server.port
    else:
        server, port = serve_grpc(None)
        yield "grpc", port
        server.stop(None).wait()


def test_the_warning_about_a_plaintext_receiver_suggests_a_fix(plaintext, caplog):
    protocol, port = plaintext
    once = RetryPolicy(enabled=False)
    exporter = (
        OtlpGrpcExporter(f"127.0.0.1:{port}", retry=once)
        if protocol == "grpc"
        else OtlpHttpExporter(f"https://127.0.0.1:{port}", retry=once)
    )
    with caplog.at_level(logging.WARNING):
        exporter.export(Batch(b"", Form.PROTOBUF, (), 0, 0))
    exporter.shutdown()
    assert "the receiver does not use TLS on this port: set tls: {insecure: true}" in caplog.text


def test_the_hint_for_a_plaintext_receiver_contains_the_correct_url(plaintext):
    protocol, port = plaintext
    with pytest.raises(ExportError) as caught:
        open_receiver(f"{protocol}s://127.0.0.1:{port}")
    assert caught.value.hint == f"the receiver does not use TLS: use {protocol}://127.0.0.1:{port}"


def test_the_doctor_prints_each_fix_once():
    findings = [
        Finding("CAP_BPF", Level.FAIL, "missing", "held", "run it as root"),
        Finding("CAP_PERFMON", Level.FAIL, "missing", "held", "run it as root"),
        Finding("BPF symbols", Level.INFO, "no lengths", "lengths", "run it as root"),
        Finding("types", Level.INFO, "absent", "present", "boot another kernel"),
    ]
    text = "\n".join([*describe(findings), *conclude(findings)])
    assert text.count("run it as root") == 1
    assert text.count("boot another kernel") == 1
