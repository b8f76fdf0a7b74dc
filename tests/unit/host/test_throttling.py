"""If a kernel limit throttles sampling, the warning suggests a sufficient limit."""

import logging

import pytest

from otel_kprofiler.host import find_throttling, get_tick_rate
from otel_kprofiler.sampling.events import CpuEvents


class Limit:
    """Fake files for a host with a sampling rate limit and no online CPUs."""

    def __init__(self, limit):
        self.limit = limit

    def read_bytes(self, path):
        if path.endswith("cpu/online"):
            return b""
        assert path == "/proc/sys/kernel/perf_event_max_sample_rate"
        if self.limit is None:
            raise FileNotFoundError(path)
        return b"%d\n" % self.limit


@pytest.mark.parametrize(
    ("rate", "limit", "least"),
    [
        (99, 200, 251), (99, 250, 251), (99, 251, None), (99, 100_000, None), (99, None, None),
        (250, 250, 251), (251, 300, 501), (997, 1000, 1001), (997, 1001, None), (1000, 1000, 1001),
    ],
)  # fmt: skip
def test_a_kernel_limit_that_throttles_sampling_is_reported(rate, limit, least):
    warning = find_throttling(Limit(limit), rate, 250)
    assert bool(warning) == (least is not None)
    if least:
        assert f"is {limit}, so" in warning
        assert "for up to 4 ms, until the next tick" in warning
        assert f"set it to {least} or more" in warning
        assert not find_throttling(Limit(least), rate, 250)


def test_each_reduction_in_the_limit_is_reported_once(caplog):
    caplog.set_level(logging.WARNING)
    files = Limit(100_000)
    events = CpuEvents(files, -1, 1_000_000_000 // 99, (), lambda cpu: 0)
    for limit, lines in (
        (100_000, 0),
        (get_tick_rate(), 1),
        (get_tick_rate(), 1),
        (None, 1),
        (1, 2),
    ):
        files.limit = limit
        events.follow()
        assert len(caplog.messages) == lines
    assert "perf_event_max_sample_rate is 1, so" in caplog.messages[-1]
