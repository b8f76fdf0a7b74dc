"""The page explains why a view has no samples, and offers a button and a key to go back."""

from dataclasses import replace

import pytest

from otel_kprofiler.model import OFF_CPU, Profile, Resource, ResourceSamples, Stack, WindowSample
from tests.browser.flame_graph import PROFILE, SYSCALL, go, rows, text, window

REASON = """(one => one?.checkVisibility() ? one.textContent : null)(
  document.querySelector(".empty p"))"""
WAYS = "[...document.querySelectorAll('.empty button')].map(one => one.textContent)"
IDS = """Object.fromEntries(viewer.profile().functions.map(
  one => [viewer.profile().name(one.frame), one.id]))"""


def test_a_view_with_samples_shows_no_empty_state_message(page):
    assert page.evaluate(REASON) is None


def test_contradictory_filters_are_listed_with_buttons_that_remove_them(page):
    go(page, "process=sh&cpu=0")
    assert page.evaluate(REASON) == "No samples of on_cpu pass: process sh, CPU 0."
    assert page.evaluate(WAYS) == [
        "All processes · 65 samples", "All CPUs · 25 samples", "All samples · 100 samples",
    ]  # fmt: skip
    assert text(page, "details") == page.evaluate(REASON)
    page.click(".empty button:nth-of-type(2)")
    assert page.evaluate(REASON) is None
    assert page.evaluate("document.activeElement.className") == "graph"
    assert text(page, "details").startswith("all · 25 samples")


@pytest.mark.parametrize("tab", "1234")
def test_the_filter_on_an_empty_view_can_be_removed_by_keyboard_in_every_tab(page, tab):
    go(page, "process=sh&cpu=0")
    page.press(tab, "g")
    assert page.evaluate("document.activeElement.textContent") == "All processes · 65 samples"
    page.press("Enter")
    assert page.evaluate(REASON) is None
    assert page.evaluate("document.getElementById('panes').contains(document.activeElement)")


def test_an_empty_chart_states_the_interval_without_samples(page):
    page.evaluate("viewer.brush([3000, 4000])")
    assert page.evaluate(REASON) == "No samples of on_cpu pass: time 3.00 s \N{EN DASH} 4.00 s."
    assert page.evaluate(WAYS) == ["Whole time · 100 samples"]


def test_an_empty_comparison_offers_to_show_the_whole_recording(page):
    go(page, "baseline=1000000001000-1000000002000&range=1000000003000-1000000004000")
    assert page.evaluate(WAYS) == ["Whole time · 100 samples"]
    page.press("g", "Enter")
    assert page.evaluate(REASON) is None
    assert page.evaluate("location.hash") in ("", "#")


def test_a_compared_range_outside_the_recording_is_explained_only_once(page):
    go(page, "baseline=0-500&range=600-900")
    assert page.evaluate(REASON) == "No samples of on_cpu pass: time outside of the recording."


def test_an_empty_view_lists_the_transforms_that_dropped_every_stack_and_can_undo_them(page):
    ids = page.evaluate(IDS)
    both = f"hide-{ids['vfs_read']}.focus-{ids['ext4_read']}"
    go(page, f"transforms=application.{both}")
    assert page.evaluate(REASON) == "No samples of on_cpu pass: without vfs_read, focus ext4_read."
    assert page.evaluate(WAYS) == [
        "Undo: without vfs_read · 60 samples", "Undo: focus ext4_read · 30 samples",
        "All samples · 100 samples",
    ]  # fmt: skip
    page.click(".empty button:last-of-type")
    assert page.evaluate(REASON) is None
    assert page.evaluate("location.hash") == "#transforms=application"


def test_a_view_without_samples_of_the_selected_kind_offers_another_kind(browser):
    samples = [WindowSample(Stack.from_frames((SYSCALL,)), 9, "t", 0, None, [10**18], [7_000_000])]
    waits = ResourceSamples(Resource({"process.executable.name": "waiter"}), samples)
    profiles = [*PROFILE.profiles, Profile(OFF_CPU, 0, [waits])]
    browser.show([replace(PROFILE, profiles=profiles)], "#kind=on_cpu&process=waiter")
    assert browser.evaluate(REASON) == "No samples of on_cpu pass: process waiter."
    assert browser.evaluate(WAYS) == [
        "All processes · 100 samples", "Show off_cpu · 7 ms", "Show wall · 7 ms",
    ]  # fmt: skip
    browser.press("g", "Tab", "Enter")
    assert browser.evaluate(REASON) is None
    assert browser.evaluate("document.getElementById('kind').value") == "off_cpu"


@pytest.mark.parametrize("windows", [[], [window()]])
def test_the_page_states_that_a_recording_has_no_samples(browser, windows):
    browser.show(windows)
    assert browser.evaluate(REASON).startswith("The recording has no samples: ")
    assert browser.evaluate(WAYS) == []


def test_the_table_reports_that_a_search_has_no_matches(page):
    page.press("3", "/", *"nowhere")
    assert rows(page) == []
    assert page.evaluate("document.querySelector('caption').textContent") == (
        "No function matches nowhere"
    )


def test_the_sandwich_view_states_that_the_selected_function_has_no_samples(page):
    go(page, f"tab=sandwich&process=sh&chosen={page.evaluate(IDS)['ext4_read']}")
    assert page.evaluate("document.querySelector('.sides h3').textContent") == (
        "No samples of ext4_read remain: choose another function."
    )
