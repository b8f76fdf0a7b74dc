"""Checks that every sample either arrived or was counted as lost, with a cause."""

import re
from collections import Counter
from pathlib import Path

from otel_kprofiler.otlp import check_payload, decode_windows

UNHURRIED = "shutdown_timeout: 60s"
"""A configuration line that allows enough time to deliver everything on a busy machine."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


class Arrived:
    """The samples and the latest totals for each stream in a receiver's data.

    Attributes:
        twice: the number of samples that repeat another sample's time and CPU. ``twice_in``
            contains the number of repeated samples in each stream.
        requests_twice: the number of duplicate requests.
    """

    def __init__(self, payloads):
        self.samples, self.totals, self.starts = Counter(), {}, []
        seen, first = Counter(), Counter(payloads)
        for payload in payloads:
            assert check_payload(payload) == []
            for window in decode_windows(payload):
                (profile,) = window.profiles
                stream = profile.totals.stream_id
                self.totals[stream] = profile.totals
                self.starts.append((window.start_unix_ns, window.end_unix_ns))
                for _, sample in profile.samples:
                    self.samples[stream] += len(sample.timestamps_unix_ns)
                    for stamp in sample.timestamps_unix_ns:
                        seen[stream, sample.cpu, stamp] += 1
        self.twice_in = Counter()
        for (stream, _, _), count in seen.items():
            self.twice_in[stream] += count - 1
        self.twice = sum(self.twice_in.values())
        self.requests_twice = sum(count - 1 for count in first.values())

    @property
    def in_order(self):
        return self.starts == sorted(self.starts)


def stop_and_check(agent, receiver, exporter="otlp_grpc"):
    """Stops an agent, checks the counts, and returns agent counts, exporter counts and samples."""
    account = agent.stop()
    got = Arrived(receiver.payloads)
    return account, check_account(account, got, exporter), got


def check_account(account, arrived, exporter="otlp_grpc"):
    """Asserts that all samples arrived or are counted as lost. Returns the exporter's counts."""
    exporter = account["exporters"][exporter]
    lost_before, lost_later = sum(account["lost"].values()), sum(exporter["lost"].values())
    assert account["taken"] == account["received"] + lost_before
    assert exporter["exported"] + lost_later + exporter["pending"] == (
        account["received"] + exporter["carried"]
    )
    assert exporter["exported"] == sum(arrived.samples.values()) - arrived.twice
    return exporter


def check_stream(arrived, stream):
    """Checks the sample counts of a stream from the receiver's data alone."""
    check_formulas(arrived.totals[stream], arrived.samples[stream] - arrived.twice_in[stream])


def check_formulas(totals, arrived):
    """Checks that a stream's last totals satisfy the formulas in docs/reliability.md."""
    lines = re.search(r"```\n(samples that arrived .*?)```", PAGE.read_text(), re.DOTALL)[1]
    formulas = [line.partition("(")[0].split("=") for line in lines.splitlines()]
    assert len(formulas) == 2
    for left, right in formulas:
        assert evaluate(left, totals, arrived) == evaluate(right, totals, arrived), left


def evaluate(terms, totals, arrived):
    """Evaluates a sum of terms such as ``stream.lost.ring_full``."""
    lost = {cause.value: count for cause, count in totals.lost.items()}
    values = {
        "samples that arrived": arrived,
        "stream.samples": totals.samples,
        "stream.taken": totals.taken,
    }
    total = 0
    for term in map(str.strip, terms.split("+")):
        if term.startswith("every stream.lost except "):
            causes = term.removeprefix("every stream.lost except ").split(" and ")
            total += sum(count for cause, count in lost.items() if cause not in causes)
        elif term.startswith("stream.lost."):
            total += lost.get(term.removeprefix("stream.lost."), 0)
        else:
            total += values[term]
    return total
