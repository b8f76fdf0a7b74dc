"""The page's span strip shows how spans spent their time."""

import pytest

from otel_kprofiler.cli.report import command
from otel_kprofiler.model import SpanLink
from tests.browser.test_accessibility import check_accessibility
from tests.commands import invoke
from tests.page import data
from tests.unit.analysis.test_span_parts import MS, A, B, parts, write

PARTS = "[...document.querySelectorAll('#parts li')].map(one => one.textContent)"
WIDTHS = "[...document.querySelectorAll('#bar i')].map(one => one.getBoundingClientRect().width)"
ODD = SpanLink(b"\7" * 16, b"\7" * 8, "GET /[x]*\x1b")


@pytest.fixture
def profile(tmp_path):
    return write(
        tmp_path / "x.otlp",
        (0, None, "user", 5),
        (5, A, "user", 2), (7, A, "disk", 4), (11, A, "kernel", 3),
        (14, None, "poll", 100),
        (114, B, "futex", 6), (120, B, "user", 2),
        (122, None, "user", 9), (131, ODD, "user", 1),
    )  # fmt: skip


def page_of(profile, *arguments):
    path = f"{profile}.html"
    invoke(command, "--force", "-o", path, *arguments, profile)
    return path


def spans(path):
    with open(path) as file:
        return data(file.read()).get("spans", [])


def test_the_page_shows_the_same_span_breakdown_as_the_report_command(profile):
    shown = {
        span["name"]: {name: ns // MS for name, ns in span["parts"]}
        for span in spans(page_of(profile))
    }
    assert list(shown)[:2] == ["", "GET /a"]
    assert shown[""] == parts(profile)
    for endpoint in ("GET /a", "GET /b"):
        assert shown[endpoint] == parts("--endpoint", endpoint, profile)
    assert shown["GET /[x]*\\x1b"] == {"user code": 1}


def test_idle_waits_are_included_in_span_parts(tmp_path):
    profile = write(tmp_path / "x.otlp", (0, A, "user", 2), (2, A, "sleep", 8), (10, A, "user", 1))
    (everything, _) = spans(page_of(profile))
    assert everything["parts"] == [["wait: sleep", 8 * MS], ["user code", 3 * MS]]


@pytest.mark.parametrize("option", [("--function", "work"), ("--endpoint", "GET /a")])
def test_span_times_are_omitted_if_a_filter_drops_some_samples_from_a_thread(profile, option):
    assert spans(page_of(profile, *option)) == []
    assert spans(page_of(profile, "--process", "shop"))


def test_span_time_is_broken_down_for_all_spans_or_for_one_endpoint(browser, profile):
    browser.open(f"file://{page_of(profile)}")
    assert browser.evaluate(PARTS) == [
        "wait: futex 33.33%", "user code 27.78%", "wait: disk 22.22%", "kernel 16.67%",
    ]  # fmt: skip
    browser.evaluate("document.getElementById('endpoint').focus()")
    browser.press("G")
    assert browser.evaluate(PARTS) == [
        "wait: disk 44.44%", "kernel 33.33%", "user code 22.22%",
    ]  # fmt: skip
    disk, kernel, user = browser.evaluate(WIDTHS)
    assert disk == pytest.approx(2 * user, rel=0.05)
    assert kernel == pytest.approx(1.5 * user, rel=0.05)


def test_the_span_strip_is_hidden_if_the_profile_has_no_spans(browser, tmp_path):
    profile = write(tmp_path / "x.otlp", (0, None, "user", 5))
    browser.open(f"file://{page_of(profile)}")
    assert not browser.evaluate("document.getElementById('spans').checkVisibility()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_reports_no_accessibility_violations(browser, profile, scheme, width):
    browser.open(f"file://{page_of(profile)}", width=width, scheme=scheme)
    check_accessibility(browser)
