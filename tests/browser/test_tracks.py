"""Thread rows on the page show when each thread ran, and what the thread waited for."""

import pytest

from otel_kprofiler.model import WaitCause
from tests.browser.flame_graph import PROFILE, text
from tests.browser.test_accessibility import check_accessibility
from tests.browser.test_wall import RECORDING, ran, recording, waited

DRAWN = "viewer.tracks.drawn()"
LABELS = """[...document.querySelectorAll('#tracks button')].map(one => one.ariaLabel)"""
SHOWN = "document.getElementById('tracks').checkVisibility()"
STATES = ["ran", "ready", "storage", "locks", "peers", "others"]


@pytest.fixture
def page(browser):
    browser.show([RECORDING])
    return browser


def ms_by_state(cells):
    sums = dict(zip(STATES, (round(sum(cell) / 1e6) for cell in cells), strict=True))
    return {state: ms for state, ms in sums.items() if ms}


def test_rows_show_each_threads_time_by_state(page):
    rows = {row["title"]: ms_by_state(row["cells"]) for row in page.evaluate(DRAWN)}
    assert rows == {
        "worker 7": {"ran": 300, "storage": 500, "locks": 100}, "worker 8": {"locks": 100},
    }  # fmt: skip
    assert page.evaluate(LABELS) == [
        (
            "Thread worker 7: on CPUs 300 ms · 33.33%, wait: disk 500 ms · 55.56%, "
            "wait: gil 100 ms · 11.11%"
        ),
        "Thread worker 8: on CPUs 0 ms · 0.00%, wait: futex 100 ms · 100.00%",
    ]


def test_a_wait_is_drawn_from_its_start_to_its_end(page):
    storage = page.evaluate(DRAWN)[0]["cells"][STATES.index("storage")]
    column_ms = 5000 / len(storage)
    covered = [at for at, value in enumerate(storage) if value]
    assert abs(covered[0] * column_ms - 2510) < 2 * column_ms
    assert abs((covered[-1] + 1) * column_ms - 3010) < 2 * column_ms
    assert len(covered) == covered[-1] - covered[0] + 1


@pytest.mark.parametrize(
    ("cause", "state"),
    [(WaitCause.RUN_QUEUE, "ready"), (WaitCause.PAGE_FAULT, "storage"), (WaitCause.GIL, "locks"),
     (WaitCause.SOCKET_SEND, "peers"), (WaitCause.SLEEP, "others"), (WaitCause.OTHER, "others"),
     (None, "others")],
)  # fmt: skip
def test_wait_causes_have_the_colour_of_their_group(browser, cause, state):
    browser.show([recording([ran(5)], [waited(200, cause)])])
    (row,) = browser.evaluate(DRAWN)
    assert ms_by_state(row["cells"]) == {"ran": 50, state: 200}


def test_clicking_a_row_selects_its_thread_and_clicking_it_again_selects_all_threads(page):
    page.evaluate("document.querySelectorAll('#tracks button')[1].focus()")
    page.press("Enter")
    assert page.evaluate("document.getElementById('thread').value") == "8 worker"
    assert text(page, "details").startswith("all · 100 ms")
    assert [row["title"] for row in page.evaluate(DRAWN)] == ["worker 8"]
    assert page.evaluate("document.activeElement.textContent") == "worker 8"
    page.click("#tracks canvas")
    assert page.evaluate("document.getElementById('thread').value") == ""


def test_thread_rows_reflect_filters_and_transforms(page):
    page.press("2", "g", "ArrowDown", "h")  # hides stacks with the widest leaf, "wait: disk"
    rows = {row["title"]: ms_by_state(row["cells"]) for row in page.evaluate(DRAWN)}
    assert rows["worker 7"] == {"ran": 300, "locks": 100}


def test_the_k_key_toggles_the_thread_rows_and_updates_the_url(page):
    assert page.evaluate(SHOWN)
    page.press("k")
    assert not page.evaluate(SHOWN)
    assert page.evaluate("location.hash") == "#tracks=off"
    page.press("k")
    assert page.evaluate(SHOWN)


def test_recordings_without_waits_show_thread_rows_on_demand(browser):
    browser.show([PROFILE])
    assert not browser.evaluate(SHOWN)
    browser.click("#tracked")
    assert browser.evaluate(SHOWN)
    rows = [
        (row["title"].split()[-1], ms_by_state(row["cells"])) for row in browser.evaluate(DRAWN)
    ]
    assert rows == [
        ("7", {"ran": 606}),
        ("5", {"ran": 253}),
        ("8", {"ran": 101}),
        ("9", {"ran": 51}),
    ]


def test_the_rows_for_many_threads_leave_space_for_the_graph(browser):
    waits = [waited(100 + tid, WaitCause.PIPE, tid=tid) for tid in range(1, 31)]
    profile = recording([ran(5)], waits)
    for width, height, rows in ((1500, 900, 8), (1000, 700, 5), (390, 844, 5), (390, 420, 2)):
        browser.show([profile], width=width, height=height)
        assert len(browser.evaluate(DRAWN)) == rows
        assert f"{30 - rows} more" in text(browser, "tracks")
        room = "document.querySelector('.graph').getBoundingClientRect().height"
        assert browser.evaluate(room) > 0.4 * height


def test_time_columns_are_computed_only_for_visible_rows(browser):
    waits = [waited(100 + tid, WaitCause.PIPE, tid=tid) for tid in range(1, 31)]
    browser.show([recording([ran(5)], waits)], width=1500, height=900)
    counted = """(() => {
      const Plain = Float64Array;
      let made = 0;
      window.Float64Array = class extends Plain {
        constructor(...size) { super(...size); made += 1; }
      };
      const { tracks } = viewer;
      const filter = { kind: tracks.profile.kinds.length - 1, cpu: null, only: null,
        threads: new Uint8Array(100).fill(1) };
      try { tracks.load(tracks.profile, filter, 100); } finally { window.Float64Array = Plain; }
      return made;
    })()"""
    assert browser.evaluate(counted) == 8 * len(STATES)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_reports_no_accessibility_violations(browser, scheme, width):
    browser.show([RECORDING], width=width, scheme=scheme)
    check_accessibility(browser)
