"""axe-core detects no accessibility violations on the page, in either theme or on any tab."""

from pathlib import Path

import pytest

from otel_kprofiler.model import USER_SIDE, FileId, Frame, Line, Module, ModuleKind
from tests.browser.flame_graph import PROFILE, sample, window

AXE = Path(__file__).parents[2] / "viewer/node_modules/axe-core/axe.min.js"
FOUND = """axe.run().then(found => found.violations.map(
  ({ id, nodes }) => [id, nodes.map(node => node.html)]))"""
VIEWS = [f"tab={tab}" for tab in ("flame", "callers", "table", "sandwich", "source")]


def check_accessibility(page):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd viewer && npm ci --ignore-scripts")
    page.evaluate(f"{AXE.read_text()};0")
    assert page.evaluate(FOUND) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, "process=sh&cpu=0"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_reports_no_accessibility_violations(browser, scheme, view, width):
    browser.show([PROFILE], f"#{view}", width=width, scheme=scheme)
    check_accessibility(browser)


@pytest.mark.parametrize("opens", ["more", "save", "help"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_violations_in_menus(browser, scheme, opens):
    browser.show([PROFILE], scheme=scheme)
    browser.press("g", "ArrowUp", "ArrowUp")
    browser.evaluate(f"document.getElementById('{opens}').click()")
    check_accessibility(browser)


def test_axe_reports_no_violations_in_a_long_legend(browser):
    frames = [
        Frame(Module(f"lib{n}.so", ModuleKind.USER, None, FileId(f"{n:032x}"), 0),
              n, (Line(f"f{n}"),), 0, USER_SIDE)
        for n in range(12)
    ]  # fmt: skip
    browser.show([window(("sh", 5, [sample([frame], 5) for frame in frames]))])
    assert (
        browser.evaluate("document.getElementById('binaries').lastChild.textContent") == "+ 4 more"
    )
    check_accessibility(browser)
