"""Whenever the counts are read during sampling, they account for every sample."""

import sys
import threading
import time

import pytest
from opentelemetry.sdk.resources import Resource
from samplers import sampling, spawned

from otel_kprofiler.export import FileExporter
from otel_kprofiler.sdk import (
    BatchProfileProcessor,
    InMemoryProfileExporter,
    KernelProfiler,
    ProfilerProvider,
    SimpleProfileProcessor,
)
from tests.agents import Agent, ask_agent
from tests.servers import HttpServer, free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(240), pytest.mark.usefixtures("sampling_host")]

READ = "while True: open('/proc/stat').read()"
CONFIG = """
receivers:
  kprofiler: {{samples_per_second: 999, reporter_interval: 1s}}
exporters:
  file: {{path: {path}}}
  otlp_http: {{endpoint: "http://127.0.0.1:{receiver}", sending_queue: {{storage: {spool}}}}}
service:
  health: {{endpoint: "{health}"}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [file, otlp_http]}}}}
"""


@pytest.fixture
def _load():
    with spawned(sys.executable, "-c", READ), spawned(sys.executable, "-c", READ):
        yield


def assert_whole(account):
    kinds = account.get("kinds", {}).values()
    for key in ("taken", "received", "waiting", "earlier") if kinds else ():
        assert account[key] == sum(kind[key] for kind in kinds)
    for kind in kinds:
        assert_whole(kind)
    assert account["gaps"] == []
    assert account["taken"] == account["received"] + sum(account["lost"].values())
    for exporter in account["exporters"].values():
        result = exporter["exported"] + sum(exporter["lost"].values()) + exporter["pending"]
        result += exporter["not_offered"] + account["waiting"]
        assert result == account["received"] + account["earlier"]


@pytest.mark.usefixtures("_load")
def test_after_each_drain_every_sample_taken_is_received_or_counted_as_lost():
    with sampling(samples_per_second=9999) as sampler:
        for _ in range(2000):
            sampler.drain()
            counts = sampler.counts()["on_cpu"]
            assert counts.taken == counts.received + sum(counts.lost.values())
            time.sleep(0.001)
        assert counts.received > 1000


@pytest.mark.usefixtures("_load")
@pytest.mark.long
def test_the_status_of_a_sampling_agent_accounts_for_every_sample(tmp_path, request):
    receiver = HttpServer(lambda request: request.reply(Content_Type="application/x-protobuf"))
    request.addfinalizer(receiver.close)
    health, accounts = f"127.0.0.1:{free_port()}", []
    configuration = CONFIG.format(
        path=tmp_path / "a.jsonl", receiver=receiver.port, spool=tmp_path / "spool", health=health
    )

    def is_enough():
        status, answer = ask_agent(health, "/status")
        accounts.extend([answer["account"]] if status else [])
        return len(accounts) >= 300 and accounts[-1]["exporters"]["file"]["exported"] >= 4_000

    with Agent(tmp_path, configuration) as agent:
        agent.wait_until(is_enough, 120)
        last = agent.stop()
    for account in (*accounts, last):
        assert_whole(account)
    assert accounts[-1]["kinds"].keys() == {"on_cpu"}
    taken = [account["taken"] for account in accounts]
    assert taken == sorted(taken)


class Slow(InMemoryProfileExporter):
    """A slow exporter, so that counts are read many times during each export."""

    name = "slow"

    def export(self, batch):
        time.sleep(0.05)
        return super().export(batch)


@pytest.mark.long
@pytest.mark.usefixtures("_load")
def test_stats_for_a_service_under_load_account_for_every_sample(tmp_path):
    """Covers adding a processor while the profiler is running, and restarting the profiler."""
    provider = ProfilerProvider(Resource({"service.name": "svc"}), shutdown_on_exit=False)
    provider.add_profile_processor(SimpleProfileProcessor(Slow()))
    provider.add_profile_processor(
        BatchProfileProcessor(FileExporter(str(tmp_path / "profiles.jsonl")))
    )
    profiler = KernelProfiler(
        provider, samples_per_second=999, target="host", reporter_interval_s=0.2
    )
    accounts, over = [], threading.Event()

    def poll():
        while not over.is_set():
            accounts.append(profiler.stats()["account"])
            time.sleep(0)

    poller = threading.Thread(target=poll)
    try:
        for number in range(2):
            profiler.start("raise")
            if not number:
                poller.start()
            time.sleep(1)
            if not number:
                provider.add_profile_processor(SimpleProfileProcessor(InMemoryProfileExporter()))
            time.sleep(1)
            profiler.stop()
            assert_whole(profiler.stats()["account"])
            assert profiler.stats()["account"]["received"] > 100
    finally:
        over.set()
        poller.join()
        provider.shutdown()
    running = [account for account in accounts if account]
    assert len(running) > 100
    for account in running:
        assert_whole(account)
    assert any(account["waiting"] for account in running)
