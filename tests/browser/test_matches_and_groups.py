"""Search matches among dimmed frames, and narrow frames grouped as "n more"."""

import time

import pytest

from tests.browser.flame_graph import (
    READ,
    SYSCALL,
    boxes,
    corner,
    frame,
    names,
    place,
    sample,
    text,
    window,
)
from tests.browser.test_page_details import tooltip

GROUPS = "viewer.panes[0].graph.groups().map(({ box, ...shown }) => shown)"
NARROW = 2000


@pytest.fixture
def narrow(browser):
    """Shows a leaf with one wide caller, and many callers that are narrower than a pixel."""
    callers = [sample([READ, frame(f"caller_{at}")], 1) for at in range(NARROW)]
    browser.show(
        [window(("x", 1, [sample([READ, SYSCALL], 2 * NARROW), *callers]))], "#tab=callers"
    )
    return browser


def hover_group(page, group):
    left, top = corner(page)
    at = boxes(page, "do_syscall_64")[0]
    x, y = left + group["x"] + group["width"] / 2, top + at["y"] + 5
    for _ in range(40):
        page.mouse("mouseMoved", x + 1, y)
        page.mouse("mouseMoved", x, y)
        if (shown := tooltip(page)) and shown["title"].endswith("more"):
            return shown
        time.sleep(0.05)
    raise AssertionError("no tooltip of the group")


def test_narrow_callers_are_grouped_and_the_group_shows_their_sum(narrow):
    groups = [group for group in narrow.evaluate(GROUPS) if group["row"] == 2]
    assert [(group["more"], group["value"]) for group in groups] == [(NARROW, NARROW)]
    assert groups[0]["width"] == pytest.approx(boxes(narrow, "do_syscall_64")[0]["width"] / 2)
    shown = hover_group(narrow, groups[0])
    assert shown["title"] == "2,000 more"
    assert shown["rows"]["Total"] == "2,000 samples"
    assert shown["rows"]["Of all"] == "33.33%"


def test_arrow_keys_skip_groups_and_a_click_on_a_group_zooms_to_its_callee(narrow):
    narrow.press("g", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight")
    assert text(narrow, "details").startswith("do_syscall_64")
    group = next(group for group in narrow.evaluate(GROUPS) if group["row"] == 2)
    hover_group(narrow, group)
    left, top = corner(narrow)
    y = top + boxes(narrow, "do_syscall_64")[0]["y"] + 5
    narrow.click_at(left + group["x"] + group["width"] / 2, y)
    assert text(narrow, "details").startswith("vfs_read")
    assert names(narrow)["vfs_read"] == 100


# The graph is redrawn in the animation frame in which its size changes.
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
PIXEL = """(name => {{
  const {{ graph }} = viewer.panes[0];
  const box = graph.boxes().find(box => box.name === name);
  const at = [box.x + box.width - 6, box.y + 3].map(one => Math.round(one * devicePixelRatio));
  return [...graph.canvas.getContext("2d").getImageData(...at, 1, 1).data];
}})("{name}")"""


def test_a_search_dims_frames_that_do_not_match(page):
    def pixel(name):
        page.evaluate(DRAWN)
        return page.evaluate(PIXEL.format(name=name))

    unsearched = {name: pixel(name) for name in ("sh", "ext4_read", "vfs_read")}
    page.press("/", *"ext4", "Escape")
    assert pixel("sh")[3] < unsearched["sh"][3]
    assert pixel("vfs_read")[3] < unsearched["vfs_read"][3]
    assert pixel("ext4_read")[3] == 255
    page.evaluate("document.getElementById('search').value = ''")
    page.press("/", "Backspace")
    page.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert {name: pixel(name) for name in unsearched} == unsearched


@pytest.mark.parametrize(("width", "height"), [(1200, 420), (390, 500)])
def test_the_next_match_is_scrolled_into_view(browser, width, height):
    deep = [frame(f"level_{level}") for level in range(100)]
    browser.show(
        [window(("x", 1, [sample(deep, 5)]))], "#search=level_3$", width=width, height=height
    )
    browser.press("n")
    assert text(browser, "details").startswith("level_3 ")
    top, bottom = browser.evaluate(
        "(b => [b.top, b.bottom])(viewer.panes[0].graph.element.getBoundingClientRect())"
    )
    assert max(top, 0) < place(browser, "level_3")[1] < min(bottom, height)
