"""The page shows source lines with their counts, or the reason why there are no lines."""

import json
import os
import socket

import pytest

from otel_kprofiler.formats import Interval, columns, compared_columns, page
from otel_kprofiler.model import PYTHON_SIDE, USER_SIDE, FileId, Frame, Line, Module, ModuleKind
from otel_kprofiler.viewing import PageServer
from tests.browser.flame_graph import READ, SYSCALL, place, sample, text
from tests.browser.test_accessibility import check_accessibility
from tests.browser.test_served_page import wait
from tests.windows import make_window

PYTHON = """\
def walk(tree):
    for child in tree:
        walk(child)
    return '<b>&amp;</b>\u202e'


def main():
    walk([])
"""
C = "".join(f"/* {n} */\n" for n in range(1, 3000))
SERVER = Module("server", ModuleKind.USER, None, FileId("5" * 32), 0)
RECORDED_NS = 10**18
ROWS = """[...document.querySelectorAll('.lines tbody tr')].map(row => [
  Number(row.dataset.line), ...[...row.querySelectorAll('td')].map(cell => cell.textContent)])"""
COUNTED = f"({ROWS}).filter(([, ...cells]) => cells.slice(0, -1).some(Boolean))"
NOTES = "[...document.querySelectorAll('.notes p')].map(note => note.textContent)"
MARKED = """[...document.querySelectorAll('.lines tr.hot')].map(row => Number(row.dataset.line))"""
IN_VIEW = """(line => (row => { const [one, all] = [row, document.querySelector('.lines')]
  .map(element => element.getBoundingClientRect());
  return one.top >= all.top && one.bottom <= all.bottom })(
  document.querySelector(`.lines [data-line="${line}"]`)))"""


class Files:
    """Source files on disk, and a profile whose frames refer to them."""

    def __init__(self, folder):
        self.python, self.c = folder / "app.py", folder / "server.c"
        self.missing = folder / "missing.c"
        self.python.write_text(PYTHON)
        self.c.write_text(C)
        for path in (self.python, self.c):
            os.utime(path, ns=(RECORDED_NS - 1, RECORDED_NS - 1))
        self.host = socket.gethostname()

    def python_frame(self, name, line):
        return Frame(None, 0, (Line(name, "", str(self.python), line, 1),), 0, PYTHON_SIDE)

    def c_frame(self, name, line, path=None):
        lines = (Line(name, "", str(path or self.c), line),)
        return Frame(SERVER, 0x100 + line, lines, 0, USER_SIDE)

    def window(self, hashed=25):
        main, walk = self.python_frame("main", 8), self.python_frame("walk", 3)
        end = self.python_frame("walk", 2)
        native = Frame(SERVER, 0x50, (Line("native"),), 0, USER_SIDE)
        samples = [
            sample([end, walk, walk, main], 30),
            sample([native, walk, main], 20, cpu=1),
            sample([READ, SYSCALL, native, end, main], 10),
            sample([self.c_frame("hash", 2500)], hashed),
            sample([READ, SYSCALL, self.c_frame("hash", 12)], 5),
            sample([self.c_frame("gone", 7, self.missing)], 10),
        ]
        attributes = {"process.pid": 7, "process.executable.name": "app", "host.name": self.host}
        end_ns = RECORDED_NS + 5 * 10**9
        return make_window(RECORDED_NS, end_ns, (attributes, samples), period_ns=10_101_010)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def show(browser, files):
    """Returns a function that serves the page like ``view``, and opens it at a URL fragment."""
    servers = []

    def open_page(address, **options):
        def answer(_):
            return [json.dumps(columns([files.window()])).encode()]

        named = {str(files.python), str(files.c), str(files.missing)}
        text = page({"source": "profile.json", "files": "source.json"}, connects=True)
        servers.append(PageServer("127.0.0.1:0", text, answer, named.__contains__))
        browser.open(f"{servers[-1].address}#{address}", **options)
        wait(browser, "window.viewer.panes.length > 0")
        return browser

    yield open_page
    browser.open("about:blank")
    for server in servers:
        server.close()


def id_of(browser, name):
    return browser.evaluate(
        f"viewer.profile().functions.find(one => viewer.profile().name(one.frame) === '{name}').id"
    )


def choose(browser, name):
    """Selects a function in the table, and waits until its source file is shown."""
    browser.evaluate(
        "[...document.querySelectorAll('.body > .table tbody button')]"
        f".find(one => one.textContent === '{name}').click()"
    )
    wait(browser, f"!({NOTES}).some(note => note.startsWith('Loading'))")


def test_source_lines_show_self_and_total_values_and_mark_the_hottest_line(show):
    page = show("tab=source")
    choose(page, "main (app.py:8)")
    # A stack that contains line 3 twice is counted once. Samples with native or kernel leaves
    # count towards their Python line.
    assert page.evaluate(COUNTED) == [
        [2, "40", "40.00%", "40", "40.00%", "    for child in tree:"],
        [3, "20", "20.00%", "50", "50.00%", "        walk(child)"],
        [8, "", "", "60", "60.00%", "    walk([])"],
    ]
    assert page.evaluate(MARKED) == [2]
    assert page.evaluate(NOTES) == []
    assert page.evaluate(ROWS)[3] == [4, "", "", "", "", "    return '<b>&amp;</b>\\u202e'"]
    current = "[...document.querySelectorAll('.lines [aria-current]')].map(row => row.dataset.line)"
    assert page.evaluate(current) == ["8"]


def test_source_lines_of_native_functions_show_counts_and_scroll_into_view(show):
    page = show("tab=source")
    choose(page, "hash")
    assert [row[:5] for row in page.evaluate(COUNTED)] == [[2500, "25", "25.00%", "25", "25.00%"]]
    assert page.evaluate(f"{IN_VIEW}(2500)")
    page.press("n")
    assert text(page, "details") == "Line 12 · 2 of 2 lines with samples"
    assert page.evaluate(f"{IN_VIEW}(12)")
    assert [row[:5] for row in page.evaluate(COUNTED)] == [
        [12, "", "", "5", "5.00%"], [2500, "25", "25.00%", "25", "25.00%"],
    ]  # fmt: skip
    page.press("N")
    assert page.evaluate(f"{IN_VIEW}(2500)")


def test_a_button_shows_the_omitted_lines_in_a_long_file(show):
    page = show("tab=source")
    choose(page, "hash")
    shown = page.evaluate(ROWS)
    assert (shown[0][0], shown[-1][0]) == (2000, 3000)
    page.evaluate("document.querySelector('.lines > .more').click()")
    assert page.evaluate(ROWS)[0][0] == 1


def test_filters_and_transforms_apply_to_source_lines(show):
    page = show("tab=source&cpu=0")
    choose(page, "main (app.py:8)")
    assert [row[1] for row in page.evaluate(COUNTED)] == ["40", "", ""]
    hidden = id_of(page, "native")
    page = show(f"tab=source&transforms=hide-{hidden}&chosen={id_of(page, 'main (app.py:8)')}")
    wait(page, f"({COUNTED}).length > 0 && !({NOTES}).length")
    assert [row[1] for row in page.evaluate(COUNTED)] == ["30", "", ""]


def test_a_key_opens_the_source_lines_of_the_focused_function(show):
    page = show("")
    page.click_at(*place(page, "main (app.py:8)"))
    page.press("v")
    wait(page, f"({COUNTED}).length === 3 && !({NOTES}).length")
    assert page.evaluate("document.activeElement.className") == "lines"
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(
        f"{page.evaluate('document.querySelector(`.listing h3`).textContent')}."
    )


def test_the_page_warns_if_a_source_file_may_differ_from_the_one_that_ran(show, files):
    os.utime(files.python, ns=(RECORDED_NS + 10**9, RECORDED_NS + 10**9))
    files.python.write_text("one line\n")
    os.utime(files.python, ns=(RECORDED_NS + 10**9, RECORDED_NS + 10**9))
    host, files.host = files.host, "db-7"
    page = show("tab=source")
    choose(page, "main (app.py:8)")
    assert page.evaluate(NOTES) == [
        (
            "The file changed at 2001-09-09 01:46:41 UTC, after the recording began: its lines may "
            "have moved."
        ),
        f"The file comes from {host}; the profile of db-7 may have run a different one.",
        "Samples name line 8, but the file has 2 lines: it is not the file that ran.",
    ]


def test_sample_counts_and_the_reason_are_shown_if_a_source_file_cannot_be_read(show, files):
    page = show("tab=source")
    choose(page, "gone")
    assert page.evaluate(NOTES) == [f"{files.missing} cannot be read: No such file or directory"]
    assert page.evaluate(COUNTED) == [[7, "10", "10.00%", "10", "10.00%", ""]]


def test_the_page_explains_why_a_function_has_no_source_lines(show):
    page = show("tab=source")
    choose(page, "vfs_read")
    assert page.evaluate(NOTES) == [
        "No source: samples of the kernel, such as of vfs_read, have no lines."
    ]
    choose(page, "native")
    assert page.evaluate(NOTES) == [
        (
            "No source: the samples of native have no lines. Record with --user-symbols lines, and "
            "with debug information of server."
        )
    ]
    assert not page.evaluate("document.querySelector('.lines').checkVisibility()")


def test_a_page_saved_as_a_file_explains_why_it_has_no_source_lines(browser, files):
    browser.show([files.window()], "#tab=source")
    choose(browser, "main (app.py:8)")
    (note,) = browser.evaluate(NOTES)
    assert note.startswith("This page contains no source files.")
    assert [row[0] for row in browser.evaluate(COUNTED)] == [2, 3, 8]
    assert [url[:5] for url in browser.requests] == ["file:"]


@pytest.mark.parametrize("tab", ["table", "sandwich", "source"])
@pytest.mark.parametrize("width", [1000, 390])
def test_comparisons_show_changes_in_each_tab_at_every_window_width(browser, files, tab, width):
    ends = RECORDED_NS, RECORDED_NS + 5 * 10**9
    intervals = [Interval(name, [files.window(hashed)], *ends)
                 for name, hashed in (("before", 25), ("after", 525))]  # fmt: skip
    fragment = f"#tab={tab}&baseline=0-5000&range=5000-10000"
    browser.show_page(page(compared_columns(intervals)), fragment, width=width)
    choose(browser, "hash")
    changes = """[...document.querySelectorAll('.body > .table tr[aria-current] .change')]
      .filter(one => one.offsetWidth)
      .map(one => [one.textContent, one.classList.contains('gain')])"""
    is_wide = tab == "table" and width == 1000
    assert browser.evaluate(changes) == [["+62.50", True], ["+58.33", True]][: 1 + is_wide]
    names = "[...document.querySelectorAll('td.name')].map(one => one.clientWidth)"
    assert min(browser.evaluate(names)) > 90
    assert "before 25.00%, after 87.50%" in text(browser, "details")
    if tab == "source":
        assert [row[3] for row in browser.evaluate(COUNTED)] == ["-4.17", "+62.50"]
        colours = """[...document.querySelectorAll('td.gain')].map(
          cell => getComputedStyle(cell).color)"""
        assert len(set(browser.evaluate(colours))) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_reports_no_violations_in_a_source_listing(show, scheme, width):
    page = show("tab=source", scheme=scheme, width=width)
    choose(page, "main (app.py:8)")
    check_accessibility(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert page.evaluate(f"{IN_VIEW}(8)")
