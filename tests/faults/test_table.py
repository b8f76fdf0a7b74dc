"""The fault table counts received and missing samples correctly."""

import os

import pytest

from otel_kprofiler.host import Access, doctor
from otel_kprofiler.model import LossCause, Stack, StreamTotals, WindowSample
from otel_kprofiler.otlp import encode_window
from tests.faults.table import report
from tests.faults.table.batches import Batches
from tests.faults.table.payloads import Received, split
from tests.faults.table.scenario import Scenario, load
from tests.windows import make_window

PID = 4242


def payload(number, samples, totals):
    stamps = tuple(number * 1000 + at for at in range(samples))
    group = {"process.pid": PID}, (WindowSample(Stack(()), PID, "t", 0, None, stamps),)
    start = number * 1000
    window = make_window(start, start + 999, group, taken=samples, totals=totals)
    return encode_window(window).batches[0].payload


@pytest.fixture
def received():
    first = payload(1, 5, StreamTotals("ab", 5, 5, {}))
    lost = {LossCause.QUEUE_FULL: 3, LossCause.RING_FULL: 2}
    return Received([first, payload(3, 4, StreamTotals("ab", 12, 14, lost)), first], PID)


def test_samples_that_arrive_twice_are_counted_once(received):
    assert received.sum("on_cpu") == received.control == 9


def test_samples_that_a_stream_reports_as_lost_are_not_counted_as_missing(received):
    assert received.missing("on_cpu") == 0
    del received.accounts["on_cpu", "ab"]["otel_kprofiler.stream.lost.queue_full"]
    assert received.missing("on_cpu") == 3


def test_the_last_stream_in_a_spool_includes_the_counts_from_earlier_streams(received):
    account = {"stream.samples": 4, "stream.taken": 4, "earlier.samples": 12, "earlier.lost.x": 3}
    received.accounts["on_cpu", "cd"] = {f"otel_kprofiler.{k}": v for k, v in account.items()}
    assert received.missing("on_cpu") == 4
    received.samples["on_cpu", "cd"] = 4
    assert received.missing("on_cpu") == 0


def test_an_incomplete_message_in_a_file_is_an_error():
    with pytest.raises(AssertionError, match="half a message at 5 of 12"):
        list(split(b"\0\0\0\1a" + b"\0\0\0\4abc"))


def test_at_least_30_scenarios_are_defined_with_distinct_keys():
    assert len({scenario.key for scenario in load()}) == len(load()) >= 30


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, []),
        ({"difference": 3}, ["3 samples without an account"]),
        ({"others_kept": 0.94}, ["others have 94.0% of their samples"]),
        ({"others_kept": 0.8, "missed_share": 0.18}, []),
        (
            {"others_kept": 0.8, "missed_share": 0.1},
            ["others have 80.0% of their samples, and 10.0% are counted as missed"],
        ),
        ({"others_named": 0.5}, ["50.0% of others' samples have names"]),
        ({"problems": ["the agent has ended with -9"]}, ["the agent has ended with -9"]),
    ],
)
def test_each_measurement_outside_its_limits_is_reported_as_a_failure(changes, failure):
    good = {"problems": [], "difference": 0, "others_kept": 0.99, "others_named": 1.0}
    assert report.failures({**good, **changes}) == failure


def row(name, **changes):
    return {
        "kind": "a kind", "name": name, "problems": [], "taken": 12, "arrived": 9, "left": 1,
        "lost": {"queue_full": 1, "ring_full": 1}, "difference": 0, "others_kept": None,
        "others_named": 1.0, "rss_mb": 61.0, "cpu": 1.1, **changes,
    }  # fmt: skip


def test_scenarios_that_were_not_run_keep_their_rows_in_the_documentation(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCS", tmp_path)
    for page in ("faults.md", "reliability.md"):
        (tmp_path / page).write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    rows = [
        row("first"),
        row("the: second", others_kept=0.861, missed_share=0.135, lost={}),
        row("gone"),
    ]
    keys = [report.key(each) for each in rows]
    report.write(dict(zip(keys, rows, strict=True)), keys)
    page = (tmp_path / "faults.md").read_text()
    assert "| the: second | 12 | 9 | 1 | 0 | 0 | 86.1% + 13.5% missed | 61 | 1.1 |" in page
    assert report.parse(page) == [{**each, "kind": "A kind"} for each in rows]
    report.write({keys[0]: row("first", taken=13)}, keys[:2])
    assert (tmp_path / "faults.md").read_text() == "".join(
        line.replace("| 12 |", "| 13 |") if "first" in line else line
        for line in page.splitlines(keepends=True)
        if "gone" not in line
    )
    assert "(faults.md#a-kind) | 2 | 25 |" in (tmp_path / "reliability.md").read_text()


@pytest.mark.long
@pytest.mark.live
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the priority of the control program")
def test_samples_dropped_by_a_receiver_are_reported_as_missing():
    missing = [finding for finding in doctor(Access()) if finding.level.name == "FAIL"]
    if missing:
        pytest.skip("; ".join(f"{finding.check}: {finding.observed}" for finding in missing))

    def forget(run):
        run.wait_until(lambda: len(run.receiver.payloads) > 3, 60)
        del run.receiver.payloads[1]

    batches = Batches(together=2)
    whole, gap = batches.run([Scenario("t", "nothing"), Scenario("t", "forgets", forget)])
    batches.close()
    assert not whole["problems"] + gap["problems"]
    assert whole["difference"] == 0 < gap["difference"]
    assert whole["taken"] == whole["arrived"] + sum(whole["lost"].values())
    assert whole["expected"] > 0
    assert whole["control"] > 0
