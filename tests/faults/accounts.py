"""Checks that every sample arrived or was counted as lost by cause."""

from otel_kprofiler.model import LossCause

BEFORE_WINDOWS = {LossCause.RING_FULL, LossCause.SELF_PROFILED}
"""Causes of losses of samples that are in no window."""


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
    early = sum(count for cause, count in totals.lost.items() if cause in BEFORE_WINDOWS)
    late = sum(totals.lost.values()) - early
    assert arrived.samples[stream] - arrived.twice_in[stream] + late == totals.samples
    assert totals.samples + early == totals.taken
