"""axe-core detects no accessibility violation on the page, in both themes and every tab."""

from pathlib import Path

import pytest

from otel_kprofiler.formats import html
from tests.browser.test_flamegraph import PROFILE

AXE = Path(__file__).parents[2] / "viewer/node_modules/axe-core/axe.min.js"
FOUND = """axe.run().then(found => found.violations.map(
  ({ id, nodes }) => [id, nodes.map(node => node.html)]))"""
VIEWS = [f"tab={tab}" for tab in ("flame", "callers", "table", "sandwich")]


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
