"""The page shows frame details: tooltips, percentages and bars in tables, files and lines."""

import pytest

from otel_kprofiler.model import PYTHON_SIDE, USER_SIDE, Frame, Line
from tests.browser.flame_graph import (
    HOSTILE,
    LIBRARIES,
    PROFILE,
    PYTHON,
    SYSCALL,
    binary,
    boxes,
    hover,
    open_binaries,
    place,
    rows,
    sample,
    sort,
    window,
)
from tests.waiting import wait_until

TOOLTIP = """(tip => tip.hidden ? null : {
  title: tip.querySelector("strong").textContent,
  rows: Object.fromEntries([...tip.querySelectorAll("dt")].map(
    term => [term.textContent, term.nextElementSibling.textContent])),
  box: tip.getBoundingClientRect().toJSON(),
})(document.getElementById("tooltip"))"""


def tooltip(browser):
    """Returns the tooltip's title, rows and position, or None if no tooltip is shown."""
    return browser.evaluate(TOOLTIP)


def test_the_tooltip_at_the_pointer_shows_self_and_total_with_percentages(page):
    assert tooltip(page) is None
    hover(page, "vfs_read")
    shown = tooltip(page)
    assert shown["title"] == "vfs_read"
    assert shown["rows"] == {
        "Total": "10 samples", "Self": "10 samples", "Of all": "10.00%", "Of parent": "66.67%",
        "Module": "vmlinux",
    }  # fmt: skip
    x, y = place(page, "vfs_read")
    box = shown["box"]
    # The tooltip flips to the other side of the pointer at the window's edge.
    assert min(abs(box["left"] - x), abs(box["right"] - x)) < 40, (x, y, box)
    assert min(abs(box["top"] - y), abs(box["bottom"] - y)) < 40, (x, y, box)
    hover(page, "sh")
    assert tooltip(page)["rows"]["Of parent"] == "25.00%"
    page.mouse("mouseMoved", 5, 5)
    assert tooltip(page) is None


def test_keyboard_navigation_shows_the_tooltip_at_the_focused_frame(page):
    page.press("g", "ArrowUp")
    shown = wait_until(lambda: tooltip(page))
    assert (shown["title"], shown["rows"]["Total"]) == ("dd", "75 samples")
    page.press("Enter")
    assert tooltip(page) is None
    page.press("ArrowUp")
    assert wait_until(lambda: tooltip(page))["rows"]["Of zoomed"] == "80.00%"
    page.press("Tab")
    assert tooltip(page) is None


def test_percentages_in_the_callers_view_are_relative_to_the_callee(page):
    page.press("2")
    hover(page, "[vmlinux+0x300]")
    assert tooltip(page)["rows"] == {
        "Total": "25 samples", "Of all": "25.00%", "Of callee": "25.00%", "Module": "vmlinux",
        "No name": "the address lies between the symbols of its module",
    }  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(390, 844), (900, 420)])
def test_the_tooltip_stays_inside_the_window(browser, width, height):
    browser.show([window(("x" * 80, 1, [sample([SYSCALL], 9)]))], width=width, height=height)
    for name in ("do_syscall_64", "x" * 80):
        hover(browser, name)
        box = tooltip(browser)["box"]
        assert box["left"] >= 0
        assert box["top"] >= 0
        assert box["right"] <= width
        assert box["bottom"] <= height


def test_python_frames_show_their_file_and_line(browser):
    open_binaries(browser, LIBRARIES[:1])
    hover(browser, PYTHON)
    assert tooltip(browser)["rows"]["File"] == "/srv/app/views.py:42"


def native(name, line):
    return Frame(binary("server"), line, (Line(name, "", "/src/main.c", line),), 0, USER_SIDE)


def test_a_native_frame_lists_all_its_source_lines(browser):
    stacks = [sample([native("leaf", line), native("main", 10)], 5) for line in (7, 3, 12)]
    browser.show([window(("x", 1, [*stacks, sample([native("main", 11)], 5)]))])
    assert [(box["name"], box["share"]) for box in boxes(browser)] == [
        ("all", 100), ("x", 100), ("main", 100), ("leaf", 75),
    ]  # fmt: skip
    hover(browser, "leaf")
    assert tooltip(browser)["rows"]["File"] == "/src/main.c:3\N{EN DASH}12"
    browser.press("3")
    assert rows(browser) == [
        ["leaf", "15", "75.00%", "15", "75.00%"], ["main", "5", "25.00%", "20", "100.00%"],
    ]  # fmt: skip


def test_the_tooltip_shows_names_as_text(browser):
    frame = Frame(binary(HOSTILE), 1, (Line(HOSTILE, "", HOSTILE, 1),), 0, USER_SIDE)
    browser.show([window(("x", 1, [sample([frame], 5)]))])
    hover(browser, HOSTILE)
    assert tooltip(browser)["title"] == HOSTILE
    assert tooltip(browser)["rows"]["File"] == f"{HOSTILE}:1"
    assert browser.evaluate("document.images.length") == 0


BARS = """[...viewer.panes[0].functions.body.querySelectorAll(".share")].map(cell => {
  const [, width] = getComputedStyle(cell).backgroundImage.match(/([\\d.]+)%/);
  return [cell.textContent, Number(width)];
})"""


def test_the_bars_beside_percentages_are_relative_to_the_largest_percentage(page):
    page.press("3")
    bars = dict(page.evaluate(BARS)[::2])
    assert bars["60.00%"] == 100
    assert bars["25.00%"] == pytest.approx(41.7, abs=0.1)
    assert bars["5.00%"] > 8
    room = """(cell => cell.clientWidth - parseFloat(getComputedStyle(cell).paddingRight)
      - parseFloat(getComputedStyle(cell).fontSize) * 5.7)(document.querySelector("td.share"))"""
    assert page.evaluate(room) > 30


BAR_WIDTH = """(cell => {
  const { backgroundImage, backgroundSize } = getComputedStyle(cell);
  const [, less] = backgroundSize.match(/^calc[(]100% - ([\\d.]+)px[)]/) ?? [];
  const isBar = backgroundImage.includes("gradient");
  return isBar ? cell.clientWidth - less : 0;
})"""


@pytest.mark.parametrize("width", [390, 600, 1000, 1500])
@pytest.mark.parametrize("tab", ["table", "sandwich", "source"])
def test_bars_beside_percentages_are_visible_at_every_window_width(browser, tab, width):
    browser.show([PROFILE], f"#tab={tab}", width=width)
    widths = browser.evaluate(f"[...document.querySelectorAll('td.share')].map({BAR_WIDTH})")
    assert widths
    assert min(widths) > 25


def test_function_names_are_shown_in_full_while_file_paths_are_truncated(browser):
    line = Line("look_up_all_orders", "", "/srv/shop/deeply/nested/orders.py", 1234)
    frame = Frame(None, 0, (line,), 0, PYTHON_SIDE)
    browser.show([window(("shop", 1, [sample([frame], 5)]))], "#tab=table", width=790)
    is_cut = """[...document.querySelectorAll('td.name {}')]
      .map(one => one.scrollWidth > one.clientWidth)"""
    assert any(browser.evaluate(is_cut.format("small")))
    assert not any(browser.evaluate(is_cut.format(":is(button, span)")))


def test_a_narrow_table_still_shows_percentages_and_can_be_sorted(browser):
    browser.show([PROFILE], "#tab=table", width=390)
    headings = """[...document.querySelectorAll(".table th")]
      .filter(one => one.checkVisibility()).map(one => one.textContent)"""
    assert browser.evaluate(headings)[:3] == ["Function", "Self %", "Total %"]
    sort(browser, "Total %")
    assert rows(browser)[0][0] == "do_syscall_64"
