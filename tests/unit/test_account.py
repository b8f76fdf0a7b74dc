"""Sample counts are exact for each kind, and totals are sums over kinds."""

import json

from otel_kprofiler.model import Account, ExporterAccount, LossCause

FULL, REJECTED = LossCause.QUEUE_FULL, LossCause.REJECTED
SAMPLED = {
    "on_cpu": Account(
        100, 97, {LossCause.RING_FULL: 3}, 7, missed=6, truncated={"pending": 2, "no_rule": 1}
    ),
    "off_cpu": Account(12, 12, {}, 2, truncated={"pending": 1}),
}
DELIVERED = {
    "on_cpu": ExporterAccount("a", 80, {REJECTED: 5, FULL: 2}, 3),
    "off_cpu": ExporterAccount("a", 8, {REJECTED: 1}, 1),
}
RECEIVER = ExporterAccount.of_kinds("a", DELIVERED)


def test_sample_totals_are_summed_over_all_kinds_of_samples():
    account = Account.of_kinds(SAMPLED, (RECEIVER,))
    assert account[:4] == (112, 109, {LossCause.RING_FULL: 3}, 9)
    assert account.missed == 6
    assert account.truncated == {"pending": 3, "no_rule": 1}
    (receiver,) = account.exporters
    assert receiver[:4] == ("a", 88, {REJECTED: 6, FULL: 2}, 4)
    assert account.kinds["off_cpu"].exporters == (receiver.kinds["off_cpu"],)
    assert account.gaps() == []


def test_a_surplus_of_one_kind_does_not_hide_a_deficit_of_another():
    """An exported sample is counted under the wrong kind, so only the totals agree."""
    kinds = {
        "on_cpu": RECEIVER.kinds["on_cpu"]._replace(exported=81),
        "off_cpu": RECEIVER.kinds["off_cpu"]._replace(exported=7),
    }
    swapped = ExporterAccount.of_kinds("a", kinds)
    assert swapped.exported == RECEIVER.exported
    gaps = Account.of_kinds(SAMPLED, (swapped,)).gaps()
    assert [gap.partition(":")[0] for gap in gaps] == ["on_cpu", "off_cpu"]
    assert "exporter a accounts for 91 and 7 are in an open window" in gaps[0]


def test_sample_kinds_found_only_in_a_spool_are_counted():
    kinds = {"on_cpu": RECEIVER.kinds["on_cpu"], "other": ExporterAccount("a", 4, carried=4)}
    account = Account.of_kinds(
        {"on_cpu": SAMPLED["on_cpu"]}, (ExporterAccount.of_kinds("a", kinds),)
    )
    assert account.gaps() == []
    assert list(account.kinds) == ["on_cpu", "other"]
    lost = {"on_cpu": RECEIVER.kinds["on_cpu"], "other": ExporterAccount("a", 3, carried=4)}
    account = Account.of_kinds(
        {"on_cpu": SAMPLED["on_cpu"]}, (ExporterAccount.of_kinds("a", lost),)
    )
    assert [gap.partition(":")[0] for gap in account.gaps()] == ["other"]


def test_a_sample_kind_that_never_reached_an_exporter_is_reported_as_a_gap():
    assert len(Account.of_kinds({"on_cpu": Account(3, 3)}, (ExporterAccount("a"),)).gaps()) == 1
    offered = ExporterAccount("a").add_not_offered({"on_cpu": 3})
    assert Account.of_kinds({"on_cpu": Account(3, 3)}, (offered,)).gaps() == []


def test_samples_from_earlier_profiler_runs_are_counted_by_kind():
    receiver = RECEIVER.add_not_offered({"on_cpu": 5, "off_cpu": 1})
    assert receiver.not_offered == 6
    account = Account.of_kinds(SAMPLED, (receiver,), {"on_cpu": 5, "off_cpu": 1})
    assert (account.earlier, account.gaps()) == (6, [])
    assert len(Account.of_kinds(SAMPLED, (receiver,), {"on_cpu": 6}).gaps()) == 2


def test_as_dict_contains_totals_and_kinds():
    values = json.loads(json.dumps(Account.of_kinds(SAMPLED, (RECEIVER,)).as_dict()))
    assert values["taken"] == 112
    assert values["exporters"]["a"]["lost"] == {"rejected": 6, "queue_full": 2}
    assert values["gaps"] == []
    kinds = values.pop("kinds")
    assert {kind: one["taken"] for kind, one in kinds.items()} == {"on_cpu": 100, "off_cpu": 12}
    assert kinds["off_cpu"]["exporters"]["a"]["exported"] == 8
    assert kinds["on_cpu"].keys() == values.keys()
