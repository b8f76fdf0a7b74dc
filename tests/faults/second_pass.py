"""Account for every sample independently of the package's code.

Run ``python tests/faults/second_pass.py [SCENARIO ...]`` as root. Agents run against receivers that
answer at random, are frozen, killed and reloaded, and find their spools and files damaged. Received
samples are counted here from the protobuf messages, by ``profile_id``, and compared with the
samples that the agents report as taken and lost. Exits 1 if a sample neither arrived nor was
counted.
"""

# ruff: noqa: T201 - a command talks to its user

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

ROOT = Path(__file__).parents[2]
WINDOW_S = 0.5
CONFIG = """
receivers:
  kprofiler:
    samples_per_second: {rate}
    self_profiled: mark
    send_idle_frames: true
    reporter_interval: 500ms
exporters:
  otlp_http:
    endpoint: http://127.0.0.1:{port}
    timeout: 1s
    retry_on_failure: {{initial_interval: 50ms, max_interval: 300ms, max_elapsed_time: 4s}}
    sending_queue: {queue}
  otlp_http/2: {{endpoint: "http://127.0.0.1:{port}/second", timeout: 1s}}
  file: {{path: "{directory}/out.otlp", format: proto}}
service:
  shutdown_timeout: 10s
  health: {{endpoint: "127.0.0.1:{health}"}}
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [kprofiler], exporters: [{exporters}]}}}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def count(payloads):
    """Distinct samples by profile, and the last account of each stream."""
    by_profile, told = {}, {}
    for payload in payloads:
        request = service.ExportProfilesServiceRequest.FromString(payload)
        strings, table = request.dictionary.string_table, request.dictionary.attribute_table
        for resource in request.resource_profiles:
            for scope in resource.scope_profiles:
                for profile in scope.profiles:
                    size = sum(len(one.timestamps_unix_nano) for one in profile.samples)
                    assert by_profile.setdefault(profile.profile_id, size) == size
                    account = {
                        strings[table[at].key_strindex]: table[at].value
                        for at in profile.attribute_indices
                    }
                    if "otel_kprofiler.stream.id" in account:
                        stream = account["otel_kprofiler.stream.id"].string_value
                        told[stream] = {k: v.int_value for k, v in account.items()}
    return sum(by_profile.values()), told


class Receiver:
    """An HTTP server that at random stores a request, refuses it, or misbehaves."""

    def __init__(self, manners, seed):
        self.stored, self.chance, self.manners = [], random.Random(seed), manners
        self.seen = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                manner = outer.chance.choice(outer.manners)
                outer.seen[manner] = outer.seen.get(manner, 0) + 1
                with contextlib.suppress(OSError):
                    getattr(outer, f"do_{manner}")(self, body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, handler, status, body=b"", **headers):
        handler.send_response(status)
        for name, value in {"Content-Type": "application/x-protobuf", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self, handler):
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    def do_accept(self, handler, body):
        self.stored.append(body)
        self.say(handler, 200)

    def do_accept_slowly(self, handler, body):
        time.sleep(0.3)
        self.do_accept(handler, body)

    def do_lose_the_answer(self, handler, body):
        self.stored.append(body)
        self.close(handler)

    def do_cut_the_answer(self, handler, body):
        self.stored.append(body)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
        self.close(handler)

    def do_hang(self, handler, body):
        time.sleep(1.5)
        self.close(handler)

    def do_be_busy(self, handler, body):
        self.say(handler, 503)

    def do_ask_to_wait(self, handler, body):
        self.say(handler, 429, Retry_After="1")

    def do_refuse(self, handler, body):
        self.say(handler, 400, b"no")

    def do_refuse_all_profiles(self, handler, body):
        request = service.ExportProfilesServiceRequest.FromString(body)
        answer = service.ExportProfilesServiceResponse()
        answer.partial_success.rejected_profiles = sum(
            len(scope.profiles) for r in request.resource_profiles for scope in r.scope_profiles
        )
        self.say(handler, 200, answer.SerializeToString())

    def do_babble(self, handler, body):
        self.stored.append(body)
        self.say(handler, 200, b"\xff" * 30)

    def do_answer_without_http(self, handler, body):
        handler.wfile.write(b"\x00garbage\r\n\r\n")
        self.close(handler)


class Agent:
    """The agent in a directory, with a configuration that can be changed."""

    def __init__(self, directory, port, *, queue="{}", rate=499, exporters="otlp_http"):
        self.directory, self.health = directory, free_port()
        self.settings = {"port": port, "queue": queue, "rate": rate}
        self.configure(exporters)
        with (directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "otel_kprofiler", "run", "-c", directory / "agent.yaml"],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while not self.status():
            assert time.monotonic() < deadline, (directory / "log").read_text()
            assert self.process.poll() is None, (directory / "log").read_text()
            time.sleep(0.1)

    def configure(self, exporters):
        text = CONFIG.format(
            directory=self.directory, health=self.health, exporters=exporters, **self.settings
        )
        (self.directory / "agent.yaml").write_text(text)

    def reload(self, exporters):
        self.configure(exporters)
        self.process.send_signal(signal.SIGHUP)
        time.sleep(4)

    def status(self):
        try:
            url = f"http://127.0.0.1:{self.health}/status"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, (self.directory / "log").read_text()[-3000:]
        return json.loads(out)["account"]["on_cpu"]

    def kill(self):
        self.process.kill()
        self.process.communicate()


def uncounted(account, name, arrived, *, may_be_more=False):
    """Samples neither received nor counted; negative if some were counted as both."""
    own = account["exporters"][name]
    lost = sum(account["lost"].values()) + sum(own["lost"].values())
    rest = account["waiting"] + own["pending"] + own["not_offered"]
    missing = account["taken"] - arrived - lost - rest
    print(f"   {name}: taken {account['taken']}, arrived {arrived}, lost {own['lost']} "
          f"{account['lost']}, waiting or not offered {rest}: {missing} uncounted")  # fmt: skip
    assert account["gaps"] == []
    return max(0, missing) if may_be_more else abs(missing)


def told_uncounted(told, arrived, stream):
    """The same from the account in the received data of one stream."""
    last = told[stream]
    lost = sum(
        value for key, value in last.items()
        if key.startswith("otel_kprofiler.stream.lost.") and not key.endswith("ring_full")
    )  # fmt: skip
    missing = last["otel_kprofiler.stream.samples"] - arrived - lost
    print(f"   in the data: {last['otel_kprofiler.stream.samples']} samples, arrived {arrived}, "
          f"lost {lost}: {missing} uncounted")  # fmt: skip
    return missing


GOOD = ["accept"] * 6 + ["accept_slowly", "babble"]
PASSING = ["hang", "be_busy", "ask_to_wait", "answer_without_http"]
FINAL = ["refuse", "refuse_all_profiles"]
AMBIGUOUS = ["lose_the_answer", "cut_the_answer"]


def run_against(directory, manners, queue, seconds=25, **changes):
    receiver = Receiver(manners, seed=7)
    agent = Agent(directory, receiver.port, queue=queue, **changes)
    time.sleep(seconds)
    receiver.manners = ["accept"]
    account = agent.stop()
    print(f"   answers: {receiver.seen}")
    return account, *count(receiver.stored)


def hostile_receiver(directory):
    account, arrived, _ = run_against(directory, GOOD + PASSING + FINAL, "{queue_size: 4}")
    return uncounted(account, "otlp_http", arrived)


def hostile_receiver_and_spool(directory):
    queue = f'{{storage: "{directory}/spool"}}'
    account, arrived, told = run_against(directory, GOOD + PASSING + FINAL, queue)
    (stream,) = told
    # The answer to the last batch is not waited for: it may be there, and wait in the spool, too.
    missing = uncounted(account, "otlp_http", arrived, may_be_more=True)
    return missing + abs(told_uncounted(told, arrived, stream))


def answers_that_get_lost(directory):
    queue = f'{{storage: "{directory}/spool"}}'
    account, arrived, _ = run_against(directory, GOOD + AMBIGUOUS * 3, queue)
    return uncounted(account, "otlp_http", arrived, may_be_more=True)


def freeze(directory):
    receiver = Receiver(["accept"], seed=1)
    agent = Agent(directory, receiver.port, rate=997)
    for seconds in (35, 3):
        time.sleep(3)
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        agent.process.send_signal(signal.SIGCONT)
    time.sleep(3)
    account = agent.stop()
    arrived, told = count(receiver.stored)
    (stream,) = told
    return uncounted(account, "otlp_http", arrived) + abs(told_uncounted(told, arrived, stream))


def reloads(directory):
    receiver = Receiver(GOOD, seed=2)
    agent = Agent(directory, receiver.port, exporters="otlp_http")
    for exporters in ("otlp_http, file", "file", "otlp_http", "file, otlp_http"):
        agent.reload(exporters)
    account = agent.stop()
    data = (directory / "out.otlp").read_bytes()
    payloads, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        payloads.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    missing = uncounted(account, "otlp_http", count(receiver.stored)[0])
    return missing + uncounted(account, "file", count(payloads)[0])


def damage(spool, chance):
    """Damage a segment of a spool in one of several ways; returns which.

    The end of the newest segment is spared, because its losses cannot be counted.
    """
    segments = sorted(spool.glob("*/*.spool"))
    segment = chance.choice(segments)
    content = bytearray(segment.read_bytes())
    is_newest = segment == segments[-1]
    how = chance.choice(["flip", "zero"] if is_newest else ["flip", "cut", "zero", "remove"])
    at = chance.randrange(len(content) // 4, len(content) // 2)
    if how == "remove":
        segment.unlink()
    elif how == "cut":
        segment.write_bytes(content[:at])
    else:
        end = at + (1 if how == "flip" else 4096)
        content[at:end] = bytes(byte ^ 0xFF if how == "flip" else 0 for byte in content[at:end])
        segment.write_bytes(content)
    return f"{how} {segment.name} at {at} of {len(content)}"


def kills_and_damaged_spools(directory):
    """Kill runs without a receiver and damage their spools; the last run delivers the rest."""
    chance, expected, lost, spool = random.Random(11), 0, 0, directory / "spool"
    queue = f'{{storage: "{spool}"}}'
    down = free_port()
    for _ in range(4):
        agent = Agent(directory, down, queue=queue)
        time.sleep(6)
        own = agent.status()["account"]["exporters"]["otlp_http"]
        time.sleep(4 * WINDOW_S)  # what was pending then is on the disk by now
        agent.kill()
        lost += sum(own["lost"].values())
        expected += own["exported"] + own["pending"] + sum(own["lost"].values()) - own["carried"]
        print(f"   killed, {damage(spool, chance)}")
    receiver = Receiver(["accept"], seed=4)
    agent = Agent(directory, receiver.port, queue=queue)
    time.sleep(8)
    account = agent.stop()
    own = account["exporters"]["otlp_http"]
    arrived, told = count(receiver.stored)
    print(f"   last run: {own}")
    lost += sum(own["lost"].values())
    earlier = sum(
        value
        for key, value in told[list(told)[-1]].items()
        if key.startswith("otel_kprofiler.earlier.lost.")
    )
    assert earlier == lost, "the receiver learns the losses of all earlier runs"
    taken = account["taken"] - sum(account["lost"].values())
    missing = expected + taken - arrived - lost
    print(f"   at least {expected} before, {taken} in the last run, arrived {arrived}, "
          f"lost {lost}: {max(0, missing)} uncounted")  # fmt: skip
    return max(0, missing)


def full_disk_under_a_file(directory):
    disk = directory / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
    try:
        agent = Agent(disk, free_port(), exporters="file")
        time.sleep(25)
        (disk / "log").write_bytes(b"")  # some space again
        time.sleep(3)
        account = agent.stop()
        data, payloads, at = (disk / "out.otlp").read_bytes(), [], 0
        while at + 4 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            assert at + 4 + size <= len(data), "half a message"
            payloads.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    return uncounted(account, "file", count(payloads)[0])


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        hostile_receiver, hostile_receiver_and_spool, answers_that_get_lost, freeze, reloads,
        kills_and_damaged_spools, full_disk_under_a_file,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO")
    failed = []
    for name in parser.parse_args().scenarios or SCENARIOS:
        print(name, flush=True)
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
            missing = SCENARIOS[name](Path(directory))
        if missing:
            failed.append(f"{name}: {missing} uncounted")
    print("\n".join(failed) or "every sample has arrived or is counted")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
