"""Checks that every sample arrived or was counted as lost by cause."""

import re
from pathlib import Path

UNHURRIED = "shutdown_timeout: 60s"
"""A line of the configuration that allows time to deliver everything on a busy machine."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def check_account(account, arrived, exporter="otlp_grpc"):
    """Asserts that all samples arrived or are counted as lost; returns the exporter's account."""
    exporter = account["exporters"][exporter]
    lost_before, lost_later = sum(account["lost"].values()), sum(exporter["lost"].values())
    assert account["taken"] == account["received"] + lost_before
    assert exporter["exported"] + lost_later + exporter["pending"] == (
        account["received"] + exporter["carried"]
    )
    assert exporter["exported"] == sum(arrived.samples.values()) - arrived.twice
    return exporter


def check_stream(arrived, stream):
    """Checks a stream's account from the receiver's data alone."""
    check_formulas(arrived.totals[stream], arrived.samples[stream] - arrived.twice_in[stream])


def check_formulas(totals, arrived):
    """Checks the formulas in docs/reliability.md with the last totals of a stream."""
    lines = re.search(r"```\n(samples that arrived .*?)```", PAGE.read_text(), re.DOTALL)[1]
    formulas = [line.partition("(")[0].split("=") for line in lines.splitlines()]
    assert len(formulas) == 2
    for left, right in formulas:
        assert evaluate(left, totals, arrived) == evaluate(right, totals, arrived), left


def evaluate(terms, totals, arrived):
    """Returns the sum of terms such as ``stream.lost.ring_full``."""
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
