"""Checks that every sample arrived or was counted as lost by cause."""


def check_account(account, arrived):
    """Check the agent's account: samples taken equal samples arrived plus losses by cause."""
    exporter = account["exporters"]["otlp_grpc"]
    lost_before, lost_later = sum(account["lost"].values()), sum(exporter["lost"].values())
    assert account["taken"] == account["received"] + lost_before
    assert exporter["exported"] + lost_later + exporter["pending"] == (
        account["received"] + exporter["carried"]
    )
    assert exporter["exported"] == sum(arrived.samples.values()) - arrived.twice
    return exporter


def check_stream(arrived, stream):
    """Check the same from the receiver's data alone."""
    totals = arrived.totals[stream]
    late = sum(count for cause, count in totals.lost.items() if cause.value != "ring_full")
    ring = sum(count for cause, count in totals.lost.items() if cause.value == "ring_full")
    assert arrived.samples[stream] - arrived.twice_in[stream] + late == totals.samples
    assert totals.samples + ring == totals.taken
