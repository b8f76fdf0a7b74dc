"""A stack can be copied, and the view saved as CSV, SVG and PNG."""

import csv
import io
import re
import time
from xml.etree import ElementTree as ET

import pytest

from tests.browser.flame_graph import HOSTILE, boxes, hover, sample, user, window
from tests.browser.flame_graph import binary as module

COPIED = """(copied => {
  Object.defineProperty(navigator, "clipboard", {
    value: { writeText: async text => { window.copied = text } }, configurable: true });
})()"""


def saved(browser, folder, key, name):
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.press("x", key)
    path = folder / name
    for _ in range(200):
        if path.exists() and path.stat().st_size:
            return path.read_bytes()
        time.sleep(0.05)
    raise AssertionError(f"{name} was not saved")


@pytest.mark.parametrize("tab", ["1", "2"])
def test_a_copied_stack_has_the_innermost_frame_first(page, tab):
    page.evaluate(COPIED)
    page.press(tab)
    hover(page, "ext4_read" if tab == "1" else "[0x401000]")
    page.press("y")
    lines = page.evaluate("window.copied").split("\n")
    assert lines[:4] == ["ext4_read", "vfs_read", "do_syscall_64", "[0x401000]"]


def test_csv_lists_every_function_with_exact_counts(page, tmp_path):
    rows = list(csv.DictReader(io.StringIO(saved(page, tmp_path, "c", "functions.csv").decode())))
    counts = {row["function"]: (int(row["self"]), int(row["total"])) for row in rows}
    assert counts == {
        "ext4_read": (60, 60), "vfs_read": (10, 70), "do_syscall_64": (0, 100),
        "[0x401000]": (0, 60), "bpf_prog_1": (5, 5), "[vmlinux+0x300]": (25, 25),
    }  # fmt: skip
    assert {row["unit"] for row in rows} == {"samples"}


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_names_that_start_like_formulas_are_escaped_in_csv(browser, tmp_path, start):
    name = f'{start}HYPERLINK("x","y")'
    frames = [user(name, module(name)), user(f"main{start}", module("server"))]
    browser.show([window(("x", 1, [sample(frames, 5)]))])
    table = saved(browser, tmp_path, "c", "functions.csv").decode()
    assert sorted(list(csv.reader(io.StringIO(table)))[1:]) == [
        [f"'{name}", f"'{name}", "", "5", "5", "samples"],
        [f"main{start}", "server", "", "0", "5", "samples"],
    ]


def test_a_saved_svg_contains_the_boxes_in_the_graph_and_their_names_as_text(browser, tmp_path):
    frames = [user(HOSTILE, module(HOSTILE)), user("main", module("server"))]
    browser.show([window(("x", 1, [sample(frames, 5)]))])
    root = ET.fromstring(saved(browser, tmp_path, "s", "graph.svg"))
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert len(titles) == len(boxes(browser)) == 4
    assert f"{HOSTILE} · 5 samples, 100.00%" in titles
    assert not [element for element in root.iter() if element.tag.endswith("img")]


def test_a_saved_png_has_the_size_of_the_visible_graph(page, tmp_path):
    data = saved(page, tmp_path, "p", "graph.png")
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    size = [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)]
    assert size == page.evaluate("(c => [c.width, c.height])(viewer.panes[0].graph.canvas)")


def test_tables_can_be_saved_only_as_csv(page):
    page.press("3")
    page.click("#save")
    items = page.evaluate(
        "[...document.querySelectorAll('#menu [role=menuitem]')].map(one => one.textContent)"
    )
    assert [re.sub(r"[a-z]$", "", item) for item in items] == ["Functions as CSV"]
