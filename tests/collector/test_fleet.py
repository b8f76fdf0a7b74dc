"""The fleet benchmark counts every sample from a few hosts, even if the Collector restarts."""

import argparse

import pytest

from benchmarks.fleet import describe, run, write_table

HOSTS = 12


@pytest.mark.long
def test_a_fleet_loses_no_samples_when_its_collector_restarts(tmp_path):
    arguments = argparse.Namespace(
        file=None, hosts=HOSTS, seconds=15, rate=19, restart=3, collector="0.161.0"
    )
    outcome = run(arguments)
    taken = outcome.counts.pop("taken")
    lost = {what: count for what, count in outcome.counts.items() if what != "exported" and count}
    assert lost == {}
    # A request whose response was lost during the restart is sent again.
    assert outcome.sink.samples >= outcome.counts["exported"] == taken > 0
    first = [
        min(time for time in host.arrivals if time > outcome.returned)
        for host in outcome.fleet.hosts
    ]
    assert len(first) == HOSTS
    assert max(first) - min(first) > 0.2, "all came back at once"
    outcome.counts["taken"] = taken
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- by make fleet -->\nold\n<!-- end -->\nafter\n")
    rows = list(describe(arguments, outcome))
    write_table(page, rows)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- by make fleet -->\n| What | Measured |\n")
    assert text.endswith(f"| {rows[-1][0]} | {rows[-1][1]} |\n<!-- end -->\nafter\n")
