"""Commands probe receivers before sending samples, and save rejected samples."""

import socket

import grpc
import pytest

from otel_kprofiler.cli.receivers import open_receiver
from otel_kprofiler.cli.sending import Sending
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export import exporter_from_environment
from otel_kprofiler.model import LossCause, Stack, WindowSample
from otel_kprofiler.otlp import check_payload, decode_windows, encode_empty, read_profiles
from tests.further import further
from tests.unit.export.answers import accept_only, partial_success, refuse
from tests.waiting import wait_until
from tests.windows import make_window

pytestmark = pytest.mark.system

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.chdir(tmp_path)


def window(number, samples=3):
    start = (1_700_000_000 + number) * SECOND
    sample = WindowSample(Stack(()), 7, "main", 0, None, [start + at for at in range(samples)])
    return make_window(start, start + SECOND, ({"process.pid": 1}, [sample]))


def grpc_address(receiver):
    return f"grpc://{receiver.endpoint}"


def refusal(address):
    with pytest.raises(ExportError) as raised:
        open_receiver(address)
    return raised.value


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_http_receivers_are_probed_with_a_valid_empty_request(http_receiver, protocol, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    open_receiver(http_receiver.endpoint).shutdown()
    ((path, headers, body),) = http_receiver.requests
    assert path == "/v1development/profiles"
    assert headers["Content-Type"] == protocol.replace(
        "http/protobuf", "application/x-protobuf"
    ).replace("http/json", "application/json")
    assert {violation.rule for violation in check_payload(body)} == {"no-empty"}


def test_grpc_receivers_are_probed_with_the_configured_headers(grpc_receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic me")
    exporter = open_receiver(grpc_address(grpc_receiver))
    ((request, metadata),) = grpc_receiver.requests
    assert request == encode_empty(exporter.form)
    assert metadata["authorization"] == "Basic me"
    exporter.shutdown()


@pytest.mark.parametrize(
    ("code", "text", "fix"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "does not receive OTLP profiles", "profilesSupport"),
        (grpc.StatusCode.UNAUTHENTICATED, "no (UNAUTHENTICATED)", "OTEL_EXPORTER_OTLP_HEADERS"),
        (grpc.StatusCode.PERMISSION_DENIED, "no (PERMISSION_DENIED)", "credentials"),
        (grpc.StatusCode.UNAVAILABLE, "no (UNAVAILABLE)", "start the receiver"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "no (RESOURCE_EXHAUSTED)", "try again later"),
    ],
)
def test_each_grpc_error_suggests_a_fix(grpc_receiver, code, text, fix):
    grpc_receiver.answer(refuse(code))
    error = refusal(grpc_address(grpc_receiver))
    assert f"cannot send profiles to {grpc_address(grpc_receiver)}: " in error.message
    assert text in error.message
    assert fix in error.hint


@pytest.mark.parametrize(
    ("status", "fix"),
    [(404, "profilesSupport"), (401, "credentials"), (503, "try again later"), (500, "start")],
)
def test_each_http_error_suggests_a_fix(http_receiver, status, fix):
    http_receiver.answer((status, {"Content-Type": "text/plain"}, b"these words"))
    error = refusal(http_receiver.endpoint)
    assert "these words" in error.message
    assert fix in error.hint


def test_a_receiver_that_rejects_empty_requests_passes_the_probe(grpc_receiver):
    grpc_receiver.answer(refuse(grpc.StatusCode.INVALID_ARGUMENT, "no samples"))
    open_receiver(grpc_address(grpc_receiver)).shutdown()


def test_errors_for_the_wrong_otlp_protocol_suggest_the_right_address(grpc_receiver, http_receiver):
    other = "the receiver speaks the other OTLP protocol: use"
    error = refusal(f"http://{grpc_receiver.endpoint}")
    assert error.hint == f"{other} {grpc_address(grpc_receiver)}"
    error = refusal(http_receiver.endpoint.replace("http://", "grpc://"))
    assert error.hint == f"{other} {http_receiver.endpoint}"


@pytest.mark.parametrize("scheme", ["grpc", *further("http")])
def test_unreachable_and_unresponsive_servers_are_reported(scheme, monkeypatch):
    monkeypatch.setattr("otel_kprofiler.cli.receivers._PROBE_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = refusal(f"{scheme}://127.0.0.1:{port}")
        assert "start the receiver" in error.hint
    monkeypatch.setattr("otel_kprofiler.cli.receivers._PROBE_S", 60)
    error = refusal(f"{scheme}://127.0.0.1:{port}")
    assert "onnection refused" in error.message
    assert "[Errno" not in error.message


def test_an_unresolvable_host_name_is_reported_without_a_traceback():
    assert "start the receiver" in refusal("http://receiver.invalid:4318").hint


def starts(path):
    """Returns the window numbers in a file, and checks each window's sample count."""
    windows = read_profiles(path)
    assert all(window.sample_count == 3 for window in windows)
    return [one.start_unix_ns // SECOND - 1_700_000_000 for one in windows]


def send(address, windows, beside="x.html"):
    with Sending(address, exporter_from_environment(address), beside) as sending:
        for one in windows:
            sending(one)
    return sending


def test_rejected_samples_are_saved_and_the_hint_shows_how_to_send_them(grpc_receiver, tmp_path):
    grpc_receiver.answer(b"", refuse(grpc.StatusCode.INVALID_ARGUMENT, "I do not like it"), b"")
    address = grpc_address(grpc_receiver)
    sending = send(address, map(window, range(3)))
    with pytest.raises(ExportError) as raised:
        sending.check()
    assert raised.value.message == (
        f"3 of 9 samples did not reach {address}: I do not like it (INVALID_ARGUMENT)"
    )
    assert raised.value.hint == (
        "they are in x.unsent.otlp: see the receiver's log for why it rejects the samples, then "
        f"otel-kprofiler send x.unsent.otlp {address}"
    )
    assert starts("x.unsent.otlp") == [1]
    assert (tmp_path / "x.unsent.otlp").stat().st_mode & 0o777 == 0o600
    assert sending.kept.total() == 3


def test_large_requests_are_split_and_oversized_samples_are_saved(http_receiver):
    """The hint names the setting to change before the samples are sent again."""
    never = ((1_700_000_000 + 1) * SECOND).to_bytes(8, "little")  # start of the second window
    taken = accept_only(http_receiver, lambda body: len(body) < 1000 and never not in body)
    address = http_receiver.endpoint
    sending = send(address, [window(number, samples=100) for number in range(3)])
    (account,) = sending.accounts()
    assert (account.exported, account.lost) == (200, {LossCause.TOO_LARGE: 100})
    assert sum(one.sample_count for one in decode_windows(taken)) == 200
    assert sum(window.sample_count for window in read_profiles("x.unsent.otlp")) == 100
    with pytest.raises(ExportError) as raised:
        sending.check()
    assert raised.value.hint.startswith(
        "they are in x.unsent.otlp: raise the receiver's request size limit"
    )
    assert raised.value.hint.endswith(f"then otel-kprofiler send x.unsent.otlp {address}")


def test_samples_for_an_unreachable_receiver_are_saved_in_its_encoding(http_receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    http_receiver.answer((503, {}, b""))
    sending = send(http_receiver.endpoint, map(window, range(2)), "./x.otlp.jsonl.gz")
    with pytest.raises(ExportError, match="6 of 6 samples did not reach"):
        sending.check()
    assert starts("x.unsent.otlp.jsonl") == [0, 1]


def test_queued_batches_are_saved_when_sending_stops(http_receiver, capsys):
    http_receiver.answer((503, {"Retry-After": "60"}, b""))
    address = http_receiver.endpoint

    def cut_off():
        with Sending(address, exporter_from_environment(address), "profile") as sending:
            for one in map(window, range(3)):
                sending(one)
            wait_until(lambda: http_receiver.requests and not sending._reporter._tasks())
            raise SystemExit(130)

    with pytest.raises(SystemExit):
        cut_off()
    assert sorted(starts("profile.unsent.otlp")) == [0, 1, 2]
    assert f"otel-kprofiler send profile.unsent.otlp {address}" in capsys.readouterr().err


def test_files_from_earlier_recordings_are_not_overwritten(http_receiver, tmp_path):
    http_receiver.answer((400, {}, b""))
    (tmp_path / "profile.unsent.otlp").write_bytes(b"mine")
    sending = send(http_receiver.endpoint, [window(0)], "profile")
    with pytest.raises(ExportError) as raised:
        sending.check()
    assert "profile.unsent-2.otlp" in raised.value.hint
    assert starts("profile.unsent-2.otlp") == [0]
    assert (tmp_path / "profile.unsent.otlp").read_bytes() == b"mine"


def test_samples_that_cannot_be_saved_are_reported(http_receiver):
    http_receiver.answer((400, {}, b""))
    sending = send(http_receiver.endpoint, [window(0)], "missing/x.html")
    with pytest.raises(ExportError) as raised:
        sending.check()
    assert "could not be kept (cannot write missing/x.unsent.otlp: No such file" in (
        raised.value.message
    )


def test_no_file_is_saved_if_all_samples_were_delivered(grpc_receiver, tmp_path):
    send(grpc_address(grpc_receiver), [window(0)]).check()
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_a_partial_success_quotes_the_receivers_message(grpc_receiver, tmp_path):
    grpc_receiver.answer(partial_success(1, "one is too old"))
    one = window(0)
    samples = one.profiles[0].resources[0].samples
    groups = (({"process.pid": pid}, samples) for pid in (1, 2))
    both = make_window(one.start_unix_ns, one.end_unix_ns, *groups)
    sending = send(grpc_address(grpc_receiver), [both])
    with pytest.raises(ExportError, match=r"3 of 6 samples did not reach.*one is too old"):
        sending.check()
    assert list(tmp_path.iterdir()) == [], "unknown which arrived"
