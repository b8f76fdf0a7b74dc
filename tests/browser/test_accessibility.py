"""axe-core detects no accessibility violation on the page, in both themes and every tab."""

from pathlib import Path

import pytest

from otel_kprofiler.formats import html
from otel_kprofiler.model import USER_SIDE, FileId, Frame, Line, Module, ModuleKind
from tests.browser.test_flamegraph import PROFILE, sample, window

AXE = Path(__file__).parents[2] / "viewer/node_modules/axe-core/axe.min.js"
FOUND = """axe.run().then(found => found.violations.map(
  ({ id, nodes }) => [id, nodes.map(node => node.html)]))"""
VIEWS = [f"tab={tab}" for tab in ("flame", "callers", "table", "sandwich", "source")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, "process=sh&cpu=0"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_reports_no_violations(browser, tmp_path, scheme, view, width):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd viewer && npm ci --ignore-scripts")
    path = tmp_path / "x.html"
    path.write_text(html([PROFILE]))
    browser.open(f"{path.as_uri()}#{view}", width=width, scheme=scheme)
    browser.evaluate(f"{AXE.read_text()};0")
    assert browser.evaluate(FOUND) == []


@pytest.mark.parametrize("opens", ["more", "save", "help"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_violations_of_menus(browser, tmp_path, scheme, opens):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd viewer && npm ci --ignore-scripts")
    path = tmp_path / "x.html"
    path.write_text(html([PROFILE]))
    browser.open(path.as_uri(), scheme=scheme)
    browser.press("g", "ArrowUp", "ArrowUp")
    browser.evaluate(f"document.getElementById('{opens}').click()")
    browser.evaluate(f"{AXE.read_text()};0")
    assert browser.evaluate(FOUND) == []


def test_axe_reports_no_violations_of_a_long_legend(browser, tmp_path):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: cd viewer && npm ci --ignore-scripts")
    frames = [
        Frame(Module(f"lib{n}.so", ModuleKind.USER, None, FileId(f"{n:032x}"), 0),
              n, (Line(f"f{n}"),), 0, USER_SIDE)
        for n in range(12)
    ]  # fmt: skip
    path = tmp_path / "x.html"
    path.write_text(html([window(("sh", 5, [sample([frame], 5) for frame in frames]))]))
    browser.open(path.as_uri())
    assert (
        browser.evaluate("document.getElementById('binaries').lastChild.textContent") == "+ 4 more"
    )
    browser.evaluate(f"{AXE.read_text()};0")
    assert browser.evaluate(FOUND) == []
