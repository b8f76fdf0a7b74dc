"""The retry delay grows with each consecutive failure."""

from otel_kprofiler.host.growing_holds import MAX_HELD, GrowingHolds


def test_the_delay_doubles_with_each_consecutive_failure_up_to_an_hour():
    holds = GrowingHolds()
    assert [holds.extend("file") for _ in range(9)] == [
        30, 60, 120, 240, 480, 960, 1920, 3600, 3600,
    ]  # fmt: skip
    assert holds.extend("other") == 30
    holds.end("file")
    holds.end("unknown")
    assert [holds.extend(name) for name in ("file", "other")] == [30, 60]


def test_the_key_that_failed_least_recently_is_forgotten():
    holds = GrowingHolds()
    for number in [*range(MAX_HELD), 0, MAX_HELD]:
        holds.extend(number)
    assert len(holds._holds_s) == MAX_HELD
    assert [holds.extend(number) for number in (0, 1, 2)] == [120, 30, 30]
