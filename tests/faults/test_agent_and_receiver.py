"""The agent's sample counts remain exact when its receiver fails and when the agent is killed.

Received samples are compared with the eBPF program's counts, which the agent both sends and prints.
"""

import os
import random
import shutil
import signal
import threading
import time

import grpc
import pytest

from otel_kprofiler.model import LossCause
from tests.faults.accounts import UNHURRIED, Arrived, check_stream, stop_and_check

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("load")]

OUTAGE_S = float(os.environ.get("KPROFILER_OUTAGE_S", "1.5"))


@pytest.mark.parametrize(
    "storage",
    [pytest.param(False, marks=pytest.mark.long, id="memory"), pytest.param(True, id="storage")],
)
def test_every_sample_survives_a_receiver_outage(run_agent, receiver, tmp_path, storage):
    queue = f"{{storage: '{tmp_path}/spool'}}" if storage else "{queue_size: 1000}"
    receiver.up()
    agent = run_agent(receiver.endpoint, queue=queue)
    agent.wait_until(lambda: len(receiver.payloads) > 1)
    receiver.down()
    agent.wait_until(lambda: agent.get("/status")[1]["unreachable"])
    assert "UNAVAILABLE" in agent.get("/status")[1]["unreachable"]["otlp_grpc"]
    assert agent.get("/readyz")[0] == 200
    time.sleep(OUTAGE_S)
    receiver.up()
    agent.wait_until(lambda: not agent.get("/status")[1]["unreachable"])
    _, exporter, got = stop_and_check(agent, receiver)
    assert got.in_order
    assert got.twice == 0
    assert (exporter["lost"], exporter["pending"]) == ({}, 0)
    check_stream(got, *got.totals)


@pytest.mark.long
def test_killing_the_agent_loses_only_the_open_window_and_resends_at_most_one_batch(
    run_agent, receiver, tmp_path
):
    receiver.up()
    kills = []
    for _ in range(3):
        agent = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}")
        time.sleep(random.uniform(0.2, 2))
        receiver.down()
        time.sleep(random.uniform(0.2, 1.5))
        kills.append(time.time_ns())
        agent.kill()
        receiver.up()
    agent = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}")
    account = agent.stop()
    got = Arrived(receiver.payloads)
    assert got.requests_twice <= 3
    assert got.in_order or got.requests_twice
    exporter = account["exporters"]["otlp_grpc"]
    assert exporter["pending"] == 0
    # ``unknown_since_unix_ns`` precedes the last kill by at most the length of a window plus the
    # time to write the window to disk. If the last killed agent wrote no batch, the bound applies
    # to an earlier kill. If no agent wrote a batch, the value is 1.
    unknown = exporter["unknown_since_unix_ns"]
    assert unknown == 1 or kills[0] - 2_000_000_000 < unknown <= kills[-1]
    *killed, last = got.totals
    for stream in killed:
        assert got.samples[stream] - got.twice <= got.totals[stream].samples
    check_stream(got, last)
    assert got.totals[last].unknown_since_unix_ns == unknown


def test_a_run_delivers_the_undelivered_samples_from_the_previous_run(
    run_agent, receiver, tmp_path
):
    agent = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}")
    agent.wait_until(agent.count_pending)
    first = agent.stop()
    waiting = first["exporters"]["otlp_grpc"]["pending"]
    assert waiting == first["received"] > 0
    receiver.up()
    agent = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}")
    agent.wait_until(lambda: len(receiver.payloads) > 2)
    _, exporter, got = stop_and_check(agent, receiver)
    assert exporter["carried"] == waiting
    assert got.in_order
    assert got.twice == 0
    for stream in got.totals:
        check_stream(got, stream)


@pytest.mark.long
@pytest.mark.parametrize(
    ("exporter", "storage"),
    [
        pytest.param("otlp_grpc", False, id="otlp_grpc-memory"),
        pytest.param("otlp_http", True, id="otlp_http-storage"),
        pytest.param("otlp_grpc", True, id="otlp_grpc-storage"),
        pytest.param("otlp_http", False, id="otlp_http-memory"),
    ],
)
def test_a_receiver_with_a_small_request_limit_receives_every_sample_once(
    *, run_agent, limited_receiver, tmp_path, exporter, storage
):
    queue = f"{{storage: '{tmp_path}/spool'}}" if storage else "{queue_size: 1000}"
    receiver = limited_receiver(exporter, 3000)
    agent = run_agent(
        receiver.endpoint, exporter=exporter, queue=queue, interval="1s", more=UNHURRIED
    )
    agent.wait_until(lambda: len(receiver.payloads) > 20)
    account, delivery, got = stop_and_check(agent, receiver, exporter)
    assert "rejects requests of" in agent.log
    assert max(map(len, receiver.payloads)) <= 3000
    assert got.in_order
    assert got.twice == 0
    lost = delivery["lost"]
    # Even a single sample may be too large, if it has a deep stack with names.
    assert lost.keys() <= {LossCause.TOO_LARGE.value}
    assert sum(lost.values()) < account["received"]
    check_stream(got, *got.totals)


@pytest.mark.long
def test_samples_rejected_by_the_receiver_are_counted_as_rejected(run_agent, receiver):
    refuse = iter([False, True, False, True, True])

    def answer(request, context):
        if next(refuse, False):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not like this")
        return b""

    receiver.answer = answer
    receiver.up()
    agent = run_agent(receiver.endpoint)
    agent.wait_until(lambda: len(receiver.payloads) > 4)
    _, exporter, got = stop_and_check(agent, receiver)
    assert exporter["lost"]["rejected"] > 0
    check_stream(got, *got.totals)
    assert "not like this" in agent.log


@pytest.mark.long
def test_a_second_sigterm_stops_the_agent_at_once_keeping_the_spool(run_agent, receiver, tmp_path):
    answered = threading.Event()

    def answer(request, context):
        answered.wait(60)
        return b""

    receiver.answer = answer
    receiver.up()
    agent = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}", more=UNHURRIED)
    agent.wait_until(agent.count_pending)
    agent.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert agent.process.poll() is None, "it waits for its receiver"
    agent.process.send_signal(signal.SIGTERM)
    agent.process.communicate(timeout=30)
    assert agent.process.returncode == 128 + signal.SIGTERM
    answered.set()
    receiver.down()
    receiver.answer = lambda request, context: b""
    receiver.payloads.clear()
    receiver.up()
    again = run_agent(receiver.endpoint, queue=f"{{storage: '{tmp_path}/spool'}}")
    _, exporter, _ = stop_and_check(again, receiver)
    assert exporter["carried"] > 0


@pytest.mark.long
def test_losses_during_shutdown_are_reported_to_the_receiver(run_agent, receiver):
    """The receiver is too slow and there is no spool, so most pending samples are lost."""

    def answer(request, context):
        time.sleep(0.8)
        return b""

    receiver.answer = answer
    receiver.up()
    agent = run_agent(receiver.endpoint, interval="100ms", more="shutdown_timeout: 8s")
    agent.wait_until(lambda: len(receiver.payloads) > 6)
    _, exporter, got = stop_and_check(agent, receiver)
    assert exporter["lost"]["shutdown"] > 0
    check_stream(got, *got.totals)


@pytest.mark.long
def test_a_receiver_added_by_a_reload_gets_the_number_of_missed_samples(run_agent, open_receiver):
    first, second = open_receiver(), open_receiver()
    first.up()
    second.up()
    agent = run_agent(first.endpoint)
    agent.wait_until(lambda: len(first.payloads) > 3)
    text = agent.config.read_text()
    more = f"  otlp_grpc/second: {{endpoint: '{second.endpoint}', tls: {{insecure: true}}}}\n"
    text = text.replace("service:\n", f"{more}service:\n")
    agent.config.write_text(text.replace("[otlp_grpc]", "[otlp_grpc, otlp_grpc/second]"))
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_until(lambda: len(second.payloads) > 3)
    not_offered = agent.stop()["exporters"]["otlp_grpc/second"]["not_offered"]
    assert not_offered > 0
    for receiver, lost in ((first, {}), (second, {LossCause.NOT_OFFERED: not_offered})):
        got = Arrived(receiver.payloads)
        (stream,) = got.totals
        assert got.totals[stream].lost == {**got.totals[stream].lost, **lost}
        check_stream(got, stream)


@pytest.mark.long
def test_removing_the_spool_of_a_running_agent_loses_no_samples(run_agent, receiver, tmp_path):
    """A temporary-file cleaner may remove a spool."""
    spool = tmp_path / "spool"
    agent = run_agent(receiver.endpoint, queue=f"{{storage: '{spool}'}}", more=UNHURRIED)
    agent.wait_until(agent.count_pending)
    shutil.rmtree(spool)
    agent.wait_until(lambda: "the directory was removed" in agent.log)
    agent.wait_until(lambda: list(spool.glob("otlp_grpc/*.spool")))
    (segment,) = spool.glob("otlp_grpc/*.spool")
    segment.unlink()
    agent.wait_until(segment.exists)
    assert agent.get("/status")[1]["storage"] == {}
    before = agent.stop()["exporters"]["otlp_grpc"]
    assert before["pending"] > 0
    assert before["lost"] == {}
    receiver.up()
    again = run_agent(receiver.endpoint, queue=f"{{storage: '{spool}'}}", more=UNHURRIED)
    _, after, _ = stop_and_check(again, receiver)
    assert (after["carried"], after["lost"]) == (before["pending"], {})
