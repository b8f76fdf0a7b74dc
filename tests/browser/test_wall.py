"""The page shows wall-clock time: running and waiting in a single graph, with waits by cause."""

from dataclasses import replace

import pytest

from otel_kprofiler.formats import Interval, compared_columns
from otel_kprofiler.formats import page as page_of
from otel_kprofiler.model import (
    OFF_CPU,
    ON_CPU,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    WaitCause,
    WaitState,
    WindowSample,
    WindowWait,
)
from tests.browser.flame_graph import PROFILE, READ, SYSCALL, boxes, fill, hover, names, text
from tests.browser.test_accessibility import check_accessibility

START_NS = 10**18
MS = 10**6
KIND = "document.getElementById('kind')"


def ran(count):
    times = [START_NS + 40 * MS * at for at in range(count)]
    return WindowSample(Stack.from_frames((READ, SYSCALL)), 7, "worker", 0, None, times)


def waited(ms, cause, *, tid=7, frames=(READ, SYSCALL)):
    wait = WindowWait(WaitState.INTERRUPTIBLE, cause)
    times, values = [START_NS + 3000 * MS], [ms * MS]
    return WindowSample(Stack.from_frames(frames), tid, "worker", 1, None, times, values, wait=wait)


def recording(runs, waits):
    owner = Resource({"process.pid": 7, "process.executable.name": "app"})
    profiles = [
        Profile(ON_CPU, 10 * MS, [ResourceSamples(owner, runs)]),
        Profile(OFF_CPU, 0, [ResourceSamples(owner, waits)]),
    ]
    return replace(PROFILE, profiles=profiles)


RECORDING = recording(
    [ran(30)],
    [waited(500, WaitCause.DISK), waited(100, WaitCause.GIL),
     waited(100, WaitCause.FUTEX, tid=8, frames=(SYSCALL,))],
)  # fmt: skip


@pytest.fixture
def page(browser):
    browser.show([RECORDING])
    return browser


def test_on_cpu_and_off_cpu_time_share_one_graph(page):
    assert names(page) == {
        "all": 100, "app": 100, "do_syscall_64": 100, "vfs_read": 90,
        "wait: disk": 50, "wait: gil": 10, "wait: futex": 10,
    }  # fmt: skip
    assert page.evaluate(f"{KIND}.value") == "wall"
    assert page.evaluate(f"{KIND}.title") == "on_cpu + off_cpu"
    assert page.evaluate("location.hash") == ""
    assert text(page, "details") == "all · 1,000 ms, 100.00% · 30.00% of it on CPUs"
    assert fill(page, "wait: disk") not in {fill(page, "vfs_read"), fill(page, "app")}
    assert page.evaluate("document.querySelector('#legend .wait').checkVisibility()")


def test_the_tooltip_splits_time_into_running_and_waiting_time(page):
    hover(page, "vfs_read")
    facts = page.evaluate("document.getElementById('tooltip').innerText").split("\n")
    pairs = dict(zip(facts[1::2], facts[2::2], strict=True))
    assert pairs["Total"] == "900 ms"
    assert (pairs["On CPUs"], pairs["Waiting"], pairs["Self"]) == ("300 ms", "600 ms", "300 ms")


def test_wait_causes_behave_like_functions_in_tables_and_transforms(page):
    page.press("3")
    rows = page.evaluate("""[...document.querySelector('.table').querySelectorAll('tbody tr')]
      .map(row => row.innerText.replaceAll(/\\s+/g, ' ').trim())""")
    assert rows[:2] == [
        "wait: disk 500 ms 50.00% 500 ms 50.00%",
        "vfs_read vmlinux 300 ms 30.00% 900 ms 90.00%",
    ]
    page.press("2", "g", "ArrowDown", "h")
    assert "wait: disk" not in names(page)
    assert boxes(page)[0]["name"] == "all"
    assert text(page, "details").startswith("all · 500 ms")


def test_cpu_and_wait_time_can_be_shown_separately_or_side_by_side(page):
    choose = f"{KIND}.value = '{{}}'; {KIND}.dispatchEvent(new Event('change'))"
    page.evaluate(choose.format("on_cpu"))
    assert text(page, "details") == "all · 30 samples, 100.00%"
    assert "wait: gil" not in names(page)
    page.evaluate(choose.format("off_cpu"))
    assert text(page, "details") == "all · 700 ms, 100.00%"
    page.evaluate(choose.format("*"))
    headings = page.evaluate("[...document.querySelectorAll('h2')].map(one => one.textContent)")
    assert headings == ["on_cpu · 30 samples", "off_cpu · 700 ms"]
    assert "wait: gil" in page.evaluate("viewer.panes[1].graph.boxes().map(({ name }) => name)")


def test_filters_and_time_ranges_apply_to_running_and_waiting_time(page):
    page.evaluate("viewer.brush([0, 200])")
    assert text(page, "details") == "all · 50 ms, 100.00% · 100.00% of it on CPUs"
    page.evaluate("viewer.brush(null)")
    page.evaluate("location.hash = 'thread=8 worker'")
    page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert text(page, "details") == "all · 100 ms, 100.00% · 0.00% of it on CPUs"


def test_the_cpu_strip_counts_only_on_cpu_samples(page):
    cells = page.evaluate("[...document.querySelectorAll('#strip')].length && viewer.strip.cells")
    drawn = cells.values() if isinstance(cells, dict) else cells
    assert sum(drawn) == 30


def test_a_comparison_of_files_initially_shows_cpu_time(browser):
    times = RECORDING.start_unix_ns, RECORDING.end_unix_ns
    sides = [Interval(name, [RECORDING], *times) for name in ("before", "after")]
    browser.show_page(page_of(compared_columns(sides)))
    assert browser.evaluate(f"{KIND}.value") == "on_cpu"
    assert text(browser, "brushed") == "after · 30 samples, against before · 30 samples"


def test_thread_rows_clip_waits_that_began_before_their_recording(browser):
    # ``after`` ends 3 s after ``before`` starts.
    after = recording([], [waited(4000, WaitCause.DISK)])
    times = after.start_unix_ns, after.end_unix_ns
    earlier = recording([ran(1)], [])
    sides = [Interval("before", [earlier], *times), Interval("after", [after], *times)]
    browser.show_page(page_of(compared_columns(sides)))
    (row,) = browser.evaluate("viewer.tracks.drawn()")
    storage = row["cells"][2]
    assert sum(storage) == pytest.approx(4000 * MS)
    assert not any(storage[: len(storage) // 2])


def test_a_recording_without_waits_offers_no_wall_clock_view(browser):
    browser.show([PROFILE])
    assert browser.evaluate(f"[...{KIND}.options].map(({{ value }}) => value)") == ["on_cpu", "*"]
    assert not browser.evaluate("document.querySelector('#legend .wait').checkVisibility()")


@pytest.mark.parametrize(
    ("others", "parts"), [([], ["other", "off_cpu"]), ([ON_CPU], ["on_cpu", "off_cpu"])]
)
def test_the_wall_view_prefers_this_profilers_on_cpu_samples_to_other_kinds(browser, others, parts):
    other, waits = RECORDING.profiles
    kinds = [ON_CPU._replace(name="other"), *others]
    profiles = [*(Profile(kind, 10 * MS, other.resources) for kind in kinds), waits]
    browser.show([replace(RECORDING, profiles=profiles)])
    assert browser.evaluate(f"{KIND}.title") == " + ".join(parts)


def test_foreign_profiles_with_several_cpu_time_kinds_have_no_wall_clock_view(browser):
    other, waits = RECORDING.profiles
    kinds = [ON_CPU._replace(name=name) for name in ("first", "second")]
    profiles = [*(Profile(kind, 10 * MS, other.resources) for kind in kinds), waits]
    browser.show([replace(RECORDING, profiles=profiles)])
    assert "wall" not in browser.evaluate(f"[...{KIND}.options].map(({{ value }}) => value)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_accessibility_violations(browser, scheme):
    browser.show([RECORDING], scheme=scheme)
    check_accessibility(browser)
