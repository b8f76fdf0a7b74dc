"""Shared links restore time ranges to the exact bin; ranges outside the recording are empty."""

from dataclasses import replace

import pytest

from otel_kprofiler.model import Stack, WindowSample
from tests.browser.flame_graph import brushed, frame, go, text, window
from tests.browser.test_empty_views import REASON, WAYS

OUTSIDE = "outside of the recording"


@pytest.mark.parametrize(
    ("after_ms_ns", "brushed_ms", "key"),
    [(400_000, "[10, 20]", "ArrowLeft"), (600_000, "[80, 90]", "ArrowRight")],
)
def test_a_link_exactly_restores_a_range_at_either_end(browser, after_ms_ns, brushed_ms, key):
    start_ns = 10**18 + after_ms_ns
    samples = [WindowSample(Stack.from_frames((frame("x"),)), 1, "x", 0, None, [start_ns])]
    recorded = replace(
        window(("x", 1, samples)), start_unix_ns=start_ns, end_unix_ns=start_ns + 10**8
    )
    browser.show([recorded])
    browser.evaluate(f"viewer.brush({brushed_ms})")
    shown, address = brushed(browser), browser.evaluate("location.href")
    browser.open("about:blank")
    browser.open(address)
    assert (brushed(browser), browser.evaluate("location.href")) == (shown, address)
    browser.evaluate("viewer.strip.element.focus()")
    browser.press(key)
    assert brushed(browser).startswith("0.00" if key == "ArrowLeft" else "0.09")


@pytest.mark.parametrize("range_", ["1-2000", "2000000000000-2000000001000"])
def test_a_range_outside_the_recording_has_no_samples(page, range_):
    go(page, f"range={range_}")
    assert page.evaluate(REASON) == f"No samples of on_cpu pass: time {OUTSIDE}."
    assert page.evaluate(WAYS) == ["Whole time · 100 samples"]
    assert brushed(page) == f"{OUTSIDE} · 0 samples"


def test_a_range_that_begins_before_the_recording_is_clipped_to_its_start(page):
    go(page, "range=999999990000-1000000001000")
    assert brushed(page) == "0.00 s - 1.00 s · 100 samples"
    assert text(page, "details").startswith("all · 100 samples")


def test_a_compared_interval_outside_the_recording_is_empty(page):
    go(page, "baseline=1-2000&range=1000000000000-1000000001000")
    assert brushed(page).endswith(f"against {OUTSIDE} · 0 samples")


def test_an_arrow_key_moves_an_out_of_bounds_range_to_the_recordings_start(page):
    go(page, "range=1-2000")
    page.evaluate("viewer.strip.element.focus()")
    page.press("ArrowRight")
    assert brushed(page).startswith("0.00 s")
