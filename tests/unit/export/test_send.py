"""``otel-kprofiler send`` delivers saved profiles, here to loopback receivers."""

import gzip
import os
import signal
import threading

import grpc
import pytest

from otel_kprofiler.cli.main import main
from otel_kprofiler.model import Form, Stack, WindowSample
from otel_kprofiler.otlp import check_payload, decode_windows, read_profiles
from tests.unit.export.answers import accept_only, partial_success, refuse
from tests.windows import encode, make_window, write_otlp

pytestmark = pytest.mark.system

SECOND = 1_000_000_000
ZIP = b"PK\x03\x04 a raw recording"
REFUSED = "see the receiver's log for why it rejects the samples"
PPROF = b"\x0a\x04\x08\x01\x10\x02\x32\x00"


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.chdir(tmp_path)


def requests(count, form=Form.PROTOBUF, samples=3):
    return [request(number, form, samples) for number in range(count)]


def request(number, form, samples):
    start = (1_700_000_000 + (number if isinstance(number, int) else 0)) * SECOND
    taken = [
        WindowSample(Stack(()), 7, f"{number} {at}", 0, None, [start + at]) for at in range(samples)
    ]
    return encode(make_window(start, start + SECOND, ({"process.pid": 1}, taken)), form)


def prefixed(messages):
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def lines(messages):
    return b"".join(message + b"\n" for message in messages)


def run(capsys, *words):
    try:
        main(["send", *map(str, words)])
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err.splitlines()


def received(receiver):
    """Returns the samples' thread ids from all requests but the first, which is a probe."""
    bodies = [one[0] if isinstance(one[0], bytes) else one[2] for one in receiver.requests[1:]]
    return sorted(
        sample.thread_name for window in decode_windows(bodies) for _, sample in window.samples
    )


def names(*numbers):
    return [f"{number} {at}" for number in numbers for at in range(3)]


FILES = {
    "one.otlp": requests(1)[0],
    "one.OTLP.GZ": gzip.compress(requests(1)[0]),
    "prefixed.otlp": prefixed(requests(3)),
    "prefixed.proto.gz": gzip.compress(prefixed(requests(3))),
    "lines.otlp.jsonl": lines(requests(3, Form.JSON)),
    "lines.otlp.jsonl.gz": gzip.compress(lines(requests(3, Form.JSON))),
}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf", "http/json"])
@pytest.mark.parametrize("name", FILES)
def test_files_in_every_encoding_are_sent_over_every_protocol(
    *, name, protocol, grpc_receiver, http_receiver, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    (tmp_path / name).write_bytes(FILES[name])
    receiver = grpc_receiver if protocol == "grpc" else http_receiver
    address = f"grpc://{receiver.endpoint}" if protocol == "grpc" else receiver.endpoint
    status, out, err = run(capsys, name, address)
    count = 1 if name.lower().startswith("one") else 3
    assert (status, err) == (0, [])
    assert out == [
        f"{name}: sent {3 * count} samples in {count} request{'s' * (count > 1)} to {address}"
    ]
    assert received(receiver) == names(*range(count))
    for one in receiver.requests[1:]:
        assert check_payload(one[0] if protocol == "grpc" else one[2]) == []


def test_the_environment_sets_headers_and_compression(http_receiver, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic me")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    (tmp_path / "x.otlp").write_bytes(requests(1)[0])
    assert run(capsys, "x.otlp", http_receiver.endpoint)[0] == 0
    for _, headers, body in http_receiver.requests:
        assert headers["Authorization"] == "Basic me"
        assert headers["Content-Encoding"] == "gzip"
        gzip.decompress(body)


def test_a_request_above_the_message_limit_is_split(grpc_receiver, tmp_path, capsys):
    big = request("thread" * 30, Form.PROTOBUF, 25_000)
    assert len(big) > 4 << 20
    (tmp_path / "x.otlp").write_bytes(big)
    status, out, _ = run(capsys, "x.otlp", f"grpc://{grpc_receiver.endpoint}")
    assert status == 0
    assert out[0].startswith("x.otlp: sent 25,000 samples in ")
    assert len(received(grpc_receiver)) == 25_000
    assert all(len(body) < 4 << 20 for body, _ in grpc_receiver.requests)


def test_a_request_rejected_for_its_size_is_split(http_receiver, tmp_path, capsys):
    huge = b"x" * 1000
    taken = accept_only(http_receiver, lambda body: len(body) < 3000 and huge not in body)
    (tmp_path / "x.otlp").write_bytes(request(0, Form.PROTOBUF, 500))
    address = http_receiver.endpoint
    status, out, err = run(capsys, "x.otlp", address)
    assert (status, err) == (0, [])
    assert out[0].startswith("x.otlp: sent 500 samples in ")
    assert sum(window.sample_count for window in decode_windows(taken)) == 500
    (tmp_path / "y.otlp").write_bytes(
        prefixed([request(1, Form.PROTOBUF, 2), request("x" * 1000, Form.PROTOBUF, 1)])
    )
    status, out, err = run(capsys, "y.otlp", address)
    assert status == 1
    assert "1 of 3 samples did not reach" in err[-2]
    assert "a single sample takes" in err[-2]
    assert err[-1].startswith("fix: raise the receiver's request size limit")
    assert err[-1].endswith(f"then otel-kprofiler send y.unsent.otlp {address}")
    status, _, err = run(capsys, "y.unsent.otlp", address)
    assert status == 1
    assert "otel-kprofiler send" not in err[-1], "the command that failed"


def test_a_profile_read_from_standard_input_is_sent(http_receiver, monkeypatch, capsys, tmp_path):
    (tmp_path / "x").write_bytes(prefixed(requests(2)))
    with open(tmp_path / "x") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert run(capsys, "-", http_receiver.endpoint)[0] == 0
    assert received(http_receiver) == names(0, 1)


@pytest.mark.parametrize(
    ("name", "content", "message", "fix"),
    [
        ("x.raw", ZIP, "a raw recording", "otel-kprofiler record --replay x.raw --export URL"),
        ("x.pb", PPROF, "a pprof profile", "otel-kprofiler report x.pb -o FILE.otlp"),
        ("x.pb.gz", gzip.compress(PPROF), "a pprof profile", "report x.pb.gz -o FILE.otlp"),
        ("x.html", b"<!doctype html>", "HTML or XML", "FILE.otlp"),
        ("x.data", b"PERFILE2", "a perf.data file", "report x.data -o FILE.otlp"),
        ("x", b"", "the file is empty", "record"),
    ],
)
def test_files_that_are_not_otlp_are_rejected_before_sending_starts(
    *, name, content, message, fix, http_receiver, tmp_path, capsys
):
    (tmp_path / "good.otlp").write_bytes(requests(1)[0])
    (tmp_path / name).write_bytes(content)
    status, out, err = run(capsys, "good.otlp", name, http_receiver.endpoint)
    assert (status, out) == (1, [])
    assert err[0].startswith(f"error: {name}: ")
    assert message in err[0]
    assert fix in err[1]
    assert http_receiver.requests == []


def test_sending_fails_if_a_file_does_not_exist_or_no_url_is_given(http_receiver, tmp_path, capsys):
    status, _, err = run(capsys, "none.otlp", http_receiver.endpoint)
    assert status == 1
    assert err[0] == "error: cannot read none.otlp: No such file or directory"
    (tmp_path / "a").write_bytes(requests(1)[0])
    (tmp_path / "b").write_bytes(requests(1)[0])
    status, _, err = run(capsys, "a", "b")
    assert status == 2
    assert "b is not a valid receiver address" in err[0]
    assert "grpc://HOST:PORT" in err[1]


def test_rejected_requests_are_saved_and_can_be_sent_again(grpc_receiver, tmp_path, capsys):
    (tmp_path / "x.otlp").write_bytes(prefixed(requests(3)))
    address = f"grpc://{grpc_receiver.endpoint}"
    grpc_receiver.answer(b"", b"", refuse(grpc.StatusCode.INVALID_ARGUMENT, "bad time"), b"")
    status, out, err = run(capsys, "x.otlp", address)
    assert status == 1
    assert out == [f"x.otlp: sent 6 samples in 2 requests to {address}"]
    assert err[-2:] == [
        f"error: 3 of 9 samples did not reach {address}: bad time (INVALID_ARGUMENT)",
        f"fix: {REFUSED}, then otel-kprofiler send x.unsent.otlp {address}",
    ]
    grpc_receiver.requests.clear()
    assert run(capsys, "x.unsent.otlp", address)[0] == 0
    assert received(grpc_receiver) == names(1)


@pytest.mark.usefixtures("fast_clock")
def test_send_waits_only_once_for_an_unresponsive_receiver(http_receiver, tmp_path, capsys):
    (tmp_path / "x.otlp").write_bytes(prefixed(requests(50)))
    (tmp_path / "y.otlp").write_bytes(prefixed(requests(2)))
    http_receiver.answer((200, {}, b""), (200, {}, b""), (503, {}, b""))
    address = http_receiver.endpoint
    status, _, err = run(capsys, "x.otlp", "y.otlp", address)
    assert status == 1
    assert err[-1] == (
        "fix: wait until the receiver responds again, then "
        f"otel-kprofiler send x.unsent.otlp y.otlp {address}"
    )
    assert sum(window.sample_count for window in read_profiles("x.unsent.otlp")) == 3 * 49
    assert sorted(os.listdir()) == ["x.otlp", "x.unsent.otlp", "y.otlp"]


def test_a_file_without_accepted_samples_is_not_copied(http_receiver, tmp_path, capsys):
    (tmp_path / "x.otlp").write_bytes(prefixed(requests(2)))
    http_receiver.answer((200, {}, b""), (400, {}, b""))
    address = http_receiver.endpoint
    status, out, err = run(capsys, "x.otlp", address)
    assert status == 1
    assert out == [f"x.otlp: sent 0 samples in 0 requests to {address}"]
    assert err[-1] == f"fix: {REFUSED}, then send the same files again"
    assert os.listdir() == ["x.otlp"]


def test_partial_success_is_shown_with_the_receivers_message(http_receiver, tmp_path, capsys):
    start = 1_700_000_000 * SECOND
    groups = (
        ({"process.pid": pid}, [WindowSample(Stack(()), 7, "x", 0, None, [start + pid])])
        for pid in (1, 2)
    )
    write_otlp(tmp_path / "x.otlp", make_window(start, start + SECOND, *groups))
    kind = {"Content-Type": "application/x-protobuf"}
    http_receiver.answer((200, {}, b""), (200, kind, partial_success(1, "too old")))
    status, out, err = run(capsys, "x.otlp", http_receiver.endpoint)
    assert status == 1
    assert out[0].startswith("x.otlp: sent 1 sample in 1 request to ")
    assert "1 of 2 samples did not reach" in err[-2]
    assert "1 profile rejected: too old" in err[-2]
    assert "the receiver accepted the rest" in err[-1]
    assert os.listdir() == ["x.otlp"]


def test_corrupt_data_in_a_file_is_skipped_and_reported(http_receiver, tmp_path, capsys):
    (tmp_path / "x.otlp").write_bytes(prefixed(requests(2))[:-5])
    status, _, err = run(capsys, "x.otlp", http_receiver.endpoint)
    assert status == 1
    assert "skipped corrupt data" in err[0]
    assert err[-2] == "error: the corrupt data was not sent"
    assert received(http_receiver) == names(0)


def test_ctrl_c_saves_unsent_samples(http_receiver, tmp_path, capsys):
    (tmp_path / "x.otlp").write_bytes(prefixed(requests(3)))
    answered = threading.Event()

    def interrupt(handler):
        os.kill(os.getpid(), signal.SIGINT)
        answered.wait(10)

    http_receiver.answer((200, {}, b""), (200, {}, b""), interrupt)
    status, _, err = run(capsys, "x.otlp", http_receiver.endpoint)
    answered.set()
    assert status == 130
    assert "6 of 9 samples did not reach" in err[-2]
    assert err[-2].endswith(": interrupted")
    assert "send x.unsent.otlp" in err[-1]
    assert sum(window.sample_count for window in read_profiles("x.unsent.otlp")) == 6
