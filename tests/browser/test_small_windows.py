"""In small windows, each row of controls is one line, and the graph takes most of the space."""

from dataclasses import replace

import pytest

from otel_kprofiler.formats import html
from otel_kprofiler.model import OFF_CPU
from tests.browser.flame_graph import PROFILE
from tests.browser.generated import busy_host

SMALL = [(600, 800), (390, 844), (844, 390), (1500, 420), (390, 420)]
LINE = 36  # pixels
HEIGHT_OF = "document.querySelector('{}').getBoundingClientRect().height"
# Names of controls that are not completely inside the window while they have focus.
OUTSIDE = """(async () => {
  const outside = [];
  for (const one of document.querySelectorAll('header :is(select, input, button)')) {
    if (!one.offsetParent || one.disabled) continue;
    one.focus();
    await new Promise(done => setTimeout(done, 20)); // the browser scrolls
    const { left, right, top, bottom } = one.getBoundingClientRect();
    const isInside = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
    if (!isInside) outside.push(one.id || one.textContent);
  }
  return outside;
})()"""


@pytest.fixture(scope="module")
def busy():
    return html([busy_host(2000, stacks=200)], title="stress-ng --matrix 4 --timeout 1h")


@pytest.mark.parametrize(("width", "height"), SMALL)
def test_the_graph_fills_most_of_the_window(browser, busy, width, height):
    browser.show_page(busy, width=width, height=height)
    for row in ("#controls", "#choices", "#about"):
        assert browser.evaluate(HEIGHT_OF.format(row)) <= LINE, row
    assert browser.evaluate(HEIGHT_OF.format(".graph")) > height / 2
    assert browser.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("tab", ["flame", "callers", "table", "sandwich", "source"])
@pytest.mark.parametrize(("width", "height"), SMALL)
def test_panes_scroll_but_the_page_does_not(browser, busy, tab, width, height):
    browser.show_page(busy, f"#tab={tab}", width=width, height=height)
    sizes = "[document.scrollingElement.scrollWidth, document.scrollingElement.scrollHeight]"
    assert browser.evaluate(sizes) == [width, height]
    shown = browser.evaluate("""[...document.querySelectorAll('.body > *, .sides > *')]
      .map(one => one.getBoundingClientRect().height)""")
    assert min(shown) > 15
    legible = "[...document.querySelectorAll('td.name button')].map(one => one.clientWidth)"
    assert all(wide > 20 for wide in browser.evaluate(legible))


def test_graphs_shown_side_by_side_are_stacked_in_a_narrow_window(browser):
    waits = replace(PROFILE, profiles=[replace(PROFILE.profiles[0], kind=OFF_CPU)])
    browser.show([PROFILE, waits], "#kind=*", width=390, height=420)
    tops = browser.evaluate("""[...document.querySelectorAll('.graph')].map(graph => {
      graph.focus();
      const { top, bottom } = graph.getBoundingClientRect();
      return Math.min(bottom, innerHeight) - top;
    })""")
    assert len(tops) == 2
    assert min(tops) > 80


def test_controls_occupy_two_lines_in_a_wide_window(browser, busy):
    browser.show_page(busy, width=1500, height=900)
    for row in ("#controls", "#choices"):
        assert browser.evaluate(HEIGHT_OF.format(row)) <= LINE, row


@pytest.mark.parametrize("width", [1500, 1200, 1000, 800, 600, 390])
def test_the_time_strip_stays_under_the_pointer_while_a_range_is_selected(browser, busy, width):
    browser.show_page(busy, width=width, height=800)
    top = "document.querySelector('#strip canvas').getBoundingClientRect().top"
    height = browser.evaluate(top)
    browser.evaluate("viewer.brush([10000, 20000])")
    assert browser.evaluate("document.getElementById('whole').hidden") is False
    assert browser.evaluate(top) == height
    brushed = "(one => [one.scrollWidth, one.clientWidth])(document.getElementById('brushed'))"
    needed, shown = browser.evaluate(brushed)
    assert needed <= shown


@pytest.mark.parametrize("tab", ["table", "sandwich", "source"])
@pytest.mark.parametrize("width", [1500, 1000, 810])
def test_names_in_tables_are_readable_and_do_not_overlap_numbers(browser, busy, tab, width):
    browser.show_page(busy, f"#tab={tab}", width=width, height=800)
    rows = browser.evaluate("""[...document.querySelectorAll('td.name')].map(cell => {
      const number = [...cell.parentNode.querySelectorAll('.number')].find(one => one.offsetWidth);
      return [cell.clientWidth, cell.offsetLeft + cell.offsetWidth <= number.offsetLeft + 1,
        getComputedStyle(cell).overflowX];
    })""")
    assert min(wide for wide, *_ in rows) > 120
    assert all(beside and overflow == "hidden" for _, beside, overflow in rows)


def test_the_time_strip_shrinks_in_a_short_window(browser, busy):
    browser.show_page(busy, width=1000, height=700)
    high = browser.evaluate(HEIGHT_OF.format("#strip"))
    browser.call("Emulation.setDeviceMetricsOverride", width=1000, height=420,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
    browser.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    assert browser.evaluate(HEIGHT_OF.format("#strip")) < high / 2
