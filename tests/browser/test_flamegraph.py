"""The flame graph page in a real browser: what it shows, how it is used, how fast it opens."""

from dataclasses import replace

import pytest

from otel_kprofiler.formats import Interval, compared_columns, html
from otel_kprofiler.formats import page as page_of
from otel_kprofiler.model import FileId, Module, ModuleKind, Stack, WindowSample
from tests.browser.flame_graph import (
    DASH,
    HOSTILE,
    LIBRARIES,
    PROFILE,
    PYTHON,
    READ,
    SYSCALL,
    boxes,
    brushed,
    choose,
    fill,
    frame,
    hover,
    names,
    open_binaries,
    place,
    rows,
    sample,
    sort,
    text,
    user,
    window,
)
from tests.browser.generated import busy_host
from tests.windows import make_window


def test_frame_widths_are_proportional_to_values_and_the_page_makes_no_network_requests(page):
    drawn = names(page)
    for ambiguous in ("do_syscall_64", "vfs_read"):  # these functions have more than one frame
        assert drawn.pop(ambiguous)
    assert drawn == {
        "all": 100, "dd": 75, "sh": 25, "[0x401000]": 60, "ext4_read": 60, "bpf_prog_1": 5,
        "[vmlinux+0x300]": 25,
    }  # fmt: skip
    assert [url[:5] for url in page.requests] == ["file:"]
    assert page.evaluate("document.title") == "A & B"
    assert "100 samples · 2 CPUs · 5.0 s" in page.evaluate("document.body.textContent")


def test_kinds_of_code_differ_in_colour_and_unnamed_frames_are_hatched(page):
    colours = [fill(page, name) for name in ("do_syscall_64", "ext4_read", "bpf_prog_1", "dd")]
    assert len(set(colours)) == 4
    assert all(colour.startswith("rgb") for colour in colours)
    hatched = {box["name"] for box in boxes(page) if box["isHatched"]}
    assert hatched == {"[vmlinux+0x300]", "[0x401000]"}
    hover(page, "[vmlinux+0x300]")
    details = text(page, "details")
    assert "unresolved: the address lies between the symbols of its module" in details
    assert "25 samples, 25.00%" in details


def test_user_code_is_coloured_by_binary_and_explained_by_a_legend(browser):
    colours = open_binaries(browser, LIBRARIES)
    kinds = [fill(browser, name) for name in ("do_syscall_64", "ext4_read", "bpf_prog_1", "x")]
    assert len({*colours, *kinds, fill(browser, PYTHON)}) == 17
    assert boxes(browser, "[lib0.so+0x9]")[0]["isHatched"]
    legend = "[...document.querySelectorAll('#binaries li')].map(item => item.textContent)"
    assert browser.evaluate(legend) == [*LIBRARIES[:8], "+ 4 more"]
    for name in ("binaries", "legend"):
        assert browser.evaluate(f"document.getElementById('{name}').getBoundingClientRect().height")


def test_python_frames_show_their_line_and_hovering_shows_the_full_path(browser):
    open_binaries(browser, LIBRARIES)
    hover(browser, PYTHON)
    assert text(browser, "details").startswith(f"{PYTHON} · in /srv/app/views.py · 5 samples")


def test_a_binary_has_the_same_colour_in_every_profile(browser):
    alone = [open_binaries(browser, [name])[0] for name in LIBRARIES[:3]]
    assert alone == [open_binaries(browser, [name, "z"])[0] for name in LIBRARIES[:3]]
    assert len(open_binaries(browser, [f"x{n}" for n in range(20)])) == 20
    assert "+ 12 more" in text(browser, "binaries")


CONTRASTS = """
(() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data]
      .map((byte) => byte / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const text = luminance(getComputedStyle(document.body).color);
  return viewer.panes[0].graph.boxes().map(({ colour }) => {
    const both = [luminance(colour), text];
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  });
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_frame_names_are_readable_on_every_background_colour(browser, scheme):
    open_binaries(browser, [f"x{number}" for number in range(40)], scheme=scheme)
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert min(contrasts) > 4.5


def test_a_search_marks_matching_frames_and_shows_their_percentage(page):
    page.press("/")
    page.press(*"EXT4|bpf")
    assert text(page, "matched") == "matched 65.00%, 65 samples · 2 frames"
    assert fill(page, "ext4_read") == fill(page, "bpf_prog_1")
    page.evaluate("document.getElementById('search').value = '('")
    page.press("(")
    assert text(page, "matched") == "matched 0.00%, 0 samples"


def test_escape_leaves_the_search_field_and_keeps_the_search(page):
    page.press("/", *"ext4", "Escape")
    assert page.evaluate("document.getElementById('search').value") == "ext4"
    assert page.evaluate("document.activeElement.className") == "graph"
    assert text(page, "matched").startswith("matched 60.00%")


@pytest.mark.parametrize("tab", ["flame", "callers", "table", "sandwich"])
def test_names_are_never_interpreted_as_html(browser, tab):
    module = Module(HOSTILE, ModuleKind.USER, None, FileId("5" * 32), 0)
    stack = [user(HOSTILE + name, module) for name in ("", "2")]
    profile = window((HOSTILE, 1, [sample(stack, 5)]))
    browser.show([profile], f"#tab={tab}&search=img", title=HOSTILE)
    browser.press("g", "ArrowUp", "ArrowRight", "c")
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("window.harmed") is None
    assert browser.evaluate("document.title") == HOSTILE


def test_a_search_steps_only_through_visible_frames_while_zoomed(page):
    page.press("/", *"do_sys", "Enter")
    assert text(page, "matched") == "matched 100.00%, 100 samples · 1 of 3 frames"
    shown = text(page, "details")
    page.press("Enter")
    assert text(page, "matched").endswith("2 of 3 frames")
    assert text(page, "details") != shown
    page.press("Enter", shift=True)
    assert text(page, "details") == shown
    page.click_at(*place(page, "sh"))
    assert text(page, "matched") == "matched 100.00%, 25 samples · 1 frame"
    page.press("n")
    assert text(page, "details").startswith("do_syscall_64 · in vmlinux · 25 samples")


def test_a_click_zooms_in_and_a_key_or_the_back_button_zooms_out(page):
    page.click_at(*place(page, "sh"))
    zoomed = {"all": 100, "sh": 100, "do_syscall_64": 100, "[vmlinux+0x300]": 100}
    assert names(page) == zoomed
    page.press("r")
    assert names(page)["sh"] == 25
    page.go_back()
    assert names(page) == zoomed
    page.go_back()
    assert names(page)["sh"] == 25


def test_the_graph_can_be_navigated_zoomed_and_inverted_by_keyboard_alone(page):
    page.press("g", "ArrowUp")
    assert text(page, "details").startswith("dd · 75 samples")
    page.press("ArrowRight")
    assert text(page, "details").startswith("sh · 25 samples")
    page.press("ArrowUp", "Enter")
    assert names(page)["do_syscall_64"] == 100
    page.press("Backspace")
    assert names(page)["sh"] == 100
    page.press("Escape", "i", "ArrowDown")
    assert text(page, "details").startswith("dd")
    assert boxes(page, "all")[0]["y"] < boxes(page, "sh")[0]["y"]
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") != "graph"


@pytest.mark.parametrize("root", ["bottom", "top"])
def test_the_root_is_visible_at_any_stack_depth(browser, root):
    deep = [frame(f"level_{level}") for level in range(100)]
    browser.show([window(("x", 1, [sample(deep, 5)]))], f"#root={root}")
    drawn = boxes(browser, "all")[0]
    height = browser.evaluate("viewer.panes[0].graph.element.clientHeight")
    assert drawn["y"] == (0 if root == "top" else height - drawn["height"])


def test_the_callers_view_shows_inverted_stacks_with_the_leaf_first(page):
    page.click("[data-tab=callers]")
    rows = {}
    for box in boxes(page):
        rows.setdefault(box["row"], []).append((box["name"], box["share"]))
    assert rows[0] == [("all", 100)]
    assert rows[1] == [
        ("ext4_read", 60), ("[vmlinux+0x300]", 25), ("vfs_read", 10), ("bpf_prog_1", 5),
    ]  # fmt: skip
    assert rows[2] == [
        ("vfs_read", 60), ("do_syscall_64", 25), ("do_syscall_64", 10), ("do_syscall_64", 5),
    ]  # fmt: skip
    assert [name for name, _ in rows[3]] == ["do_syscall_64", "sh", "dd", "dd"]
    page.click_at(*place(page, "ext4_read"))
    assert names(page)["[0x401000]"] == 100


def test_the_callers_view_merges_common_frames_in_different_stacks(browser):
    one, other, leaf = frame("one"), frame("other"), frame("leaf")
    stacks = [sample([leaf, READ, one], 3), sample([leaf, READ, other], 2), sample([READ, one], 5)]
    browser.show([window(("x", 1, stacks))], "#tab=callers")
    rows = [sorted((b["name"], b["share"]) for b in boxes(browser) if b["row"] == row)
            for row in (1, 2, 3)]  # fmt: skip
    assert rows == [
        [("leaf", 50), ("vfs_read", 50)],
        [("one", 50), ("vfs_read", 50)],
        [("one", 30), ("other", 20), ("x", 50)],
    ]


def test_samples_are_filtered_by_process_thread_and_cpu(page):
    choose(page, "process", "dd")
    assert "75 samples" in text(page, "details")
    choose(page, "thread", "process 9")
    assert "5 samples" in text(page, "details")
    choose(page, "thread", "thread</script> 8")
    assert "10 samples" in text(page, "details")
    choose(page, "thread", "all")
    choose(page, "cpu", "CPU 1")
    assert "10 samples" in text(page, "details")
    choose(page, "process", "all")
    assert "35 samples" in text(page, "details")


def test_the_table_lists_functions_with_callers_and_callees(page):
    page.press("3")
    assert rows(page)[:2] == [
        ["ext4_read", "60", "60.00%", "60", "60.00%"],
        ["[vmlinux+0x300]", "25", "25.00%", "25", "25.00%"],
    ]
    sort(page, "Total")
    assert rows(page)[0] == ["do_syscall_64", "0", "0.00%", "100", "100.00%"]
    assert page.evaluate("document.querySelector('[aria-sort]').textContent") == "Total %"
    page.evaluate("document.querySelector('tbody button').click()")
    details = "do_syscall_64 · in vmlinux · self 0 samples, 0.00% · total 100 samples, 100.00%"
    assert text(page, "details") == details
    assert rows(page, "callers") == [
        ["[0x401000]", "60", "60.00%"], ["sh", "25", "25.00%"], ["dd", "15", "15.00%"],
    ]  # fmt: skip
    assert rows(page, "callees") == [
        ["vfs_read", "70", "70.00%"], ["[vmlinux+0x300]", "25", "25.00%"],
        ["bpf_prog_1", "5", "5.00%"],
    ]  # fmt: skip
    page.press("/", *"ext4")
    assert rows(page) == [["ext4_read", "60", "60.00%", "60", "60.00%"]]


def test_recursive_calls_count_once_in_a_functions_total(browser):
    browser.show([window(("x", 1, [sample([READ, SYSCALL, READ, SYSCALL], 4)]))], "#tab=table")
    assert sorted(rows(browser)) == [
        ["do_syscall_64", "0", "0.00%", "4", "100.00%"],
        ["vfs_read", "4", "100.00%", "4", "100.00%"],
    ]  # fmt: skip


def test_the_sandwich_view_shows_callers_above_and_callees_below(page):
    hover(page, "vfs_read")
    page.press("s")
    shown = "viewer.panes[0].{}.boxes().map(({{ name, row, y }}) => [row, name, y])"
    above, below = (page.evaluate(shown.format(name)) for name in ("above", "below"))
    assert [name for row, name, _ in above if row == 0] == ["vfs_read"]
    assert {name for row, name, _ in above if row == 1} == {"do_syscall_64"}
    assert {name for row, name, _ in below if row == 1} == {"ext4_read"}
    assert above[0][2] > above[1][2]
    assert below[0][2] < below[1][2]


def test_the_theme_follows_the_system_and_a_key_toggles_it(page, browser):
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.press("t")
    dark = page.evaluate(back)
    assert light != dark
    browser.show([PROFILE], scheme="dark")
    assert page.evaluate(back) == dark
    page.press("t")
    assert page.evaluate(back) == light


def strip_place(page, part):
    """Returns the window coordinates of a point on the strip, at a fraction of its width."""
    left, top, width = page.evaluate(
        "(b => [b.x, b.y, b.width])"
        "(document.querySelector('#strip canvas').getBoundingClientRect())"
    )
    return left + 46 + part * (width - 47), top + 5


@pytest.fixture
def timeline(browser):
    """Opens a ten-second profile: ``early`` runs in the first 2 s and ``late`` in the last 3 s."""
    second = 10**9
    groups = [
        ("x", 1, [
            WindowSample(Stack.from_frames((frame("early"),)), 1, "x", 0, None,
                         [10**18 + n * second // 20 for n in range(40)]),
            WindowSample(Stack.from_frames((frame("late"),)), 1, "x", 1, None,
                         [10**18 + 7 * second + n * second // 20 for n in range(60)]),
        ]),
    ]  # fmt: skip
    browser.show([replace(window(*groups), end_unix_ns=10**18 + 10 * second)])
    return browser


def test_a_brushed_interval_restricts_every_view(timeline):
    assert names(timeline).keys() == {"all", "x", "early", "late"}
    timeline.drag(strip_place(timeline, 0.6), strip_place(timeline, 0.85))
    assert names(timeline).keys() == {"all", "x", "late"}
    assert brushed(timeline) == "6.00 s - 8.50 s · 30 samples"
    timeline.press("3")
    assert rows(timeline) == [["late", "30", "100.00%", "30", "100.00%"]]
    timeline.press("w", "1")
    assert "100 samples" in text(timeline, "details")


def test_the_brush_can_be_resized_and_is_removed_by_a_click(timeline):
    timeline.drag(strip_place(timeline, 0.1), strip_place(timeline, 0.3))
    timeline.drag(strip_place(timeline, 0.3), strip_place(timeline, 0.9))
    assert brushed(timeline).startswith("1.00 s - 9.00 s · ")
    timeline.click_at(*strip_place(timeline, 0.5))
    assert "100 samples" in text(timeline, "details")
    assert brushed(timeline).startswith("whole time")


def test_keys_move_the_brush_and_announce_its_position(timeline):
    timeline.press("b", "ArrowRight", "ArrowRight")
    assert brushed(timeline) == "0.20 s - 1.20 s · 20 samples"
    timeline.press("ArrowRight", shift=True)
    said = "document.getElementById('strip').getAttribute('aria-valuetext')"
    assert timeline.evaluate(said).replace(DASH, "-") == "0.20 s - 1.40 s"
    timeline.press("Escape")
    assert brushed(timeline).startswith("whole time")


def test_two_intervals_can_be_compared(timeline):
    timeline.drag(strip_place(timeline, 0), strip_place(timeline, 0.5))
    timeline.press("d")
    timeline.drag(strip_place(timeline, 0.5), strip_place(timeline, 1))
    assert brushed(timeline) == (
        "5.00 s - 10.00 s · 60 samples, against 0.00 s - 5.00 s · 40 samples"
    )
    drawn = {box["name"]: box for box in boxes(timeline)}
    colours = {name: box["colour"] for name, box in drawn.items()}
    assert colours["all"] == colours["x"]
    assert len(set(colours.values())) == 3
    assert drawn["early"]["share"] == drawn["late"]["share"] == 50
    hover(timeline, "early")
    assert "before 100.00%, after 0.00%: -100.00" in text(timeline, "details")
    timeline.press("3")
    assert rows(timeline) == [
        ["early", "0.00%", "-100.00", "0.00%", "-100.00"],
        ["late", "100.00%", "+100.00", "100.00%", "+100.00"],
    ]
    timeline.press("d", "w")
    assert rows(timeline)[0] == ["late", "60", "60.00%", "60", "60.00%"]


def test_insignificant_differences_are_not_coloured(browser):
    stamps = [10**18 + n * 10**9 // 21 for n in range(210)]
    parts = {"one": stamps[::2], "other": stamps[1::2]}
    samples = [WindowSample(Stack.from_frames((frame(name),)), 1, "x", 0, None, times)
               for name, times in parts.items()]  # fmt: skip
    profile = replace(window(("x", 1, samples)), end_unix_ns=10**18 + 10**10)
    intervals = "#baseline=1000000000000-1000000005000&range=1000000005000-1000000009990"
    browser.show([profile], intervals)
    assert len({fill(browser, name) for name in ("one", "other", "all")}) == 1
    hover(browser, "one")
    assert "may be chance" in text(browser, "details")


def test_insignificant_differences_between_rates_are_not_coloured(browser):
    """The profiles have 51 and 98 samples, at different rates."""

    def interval(period_ns, counts):
        samples = [sample([frame(name)], count) for name, count in counts.items()]
        made = make_window(10**18, 10**18 + 5 * 10**9, ({}, samples), period_ns=period_ns)
        return Interval(str(period_ns), [made], made.start_unix_ns, made.end_unix_ns)

    first = interval(10**7, {"one": 25, "other": 25, "rare": 1})
    second = interval(5 * 10**6, {"one": 44, "other": 53, "rare": 1})
    browser.show_page(page_of(compared_columns([first, second])))
    assert len({fill(browser, name) for name in ("one", "other", "all")}) == 1
    third = interval(5 * 10**6, {"one": 10, "other": 90, "rare": 1})
    browser.show_page(page_of(compared_columns([first, third])))
    assert len({fill(browser, name) for name in ("one", "other", "all")}) == 3


def test_a_page_with_two_intervals_opens_as_a_comparison(browser):
    def interval(name, start, count):
        result = window(("x", 1, [sample([frame("same")], 50), sample([frame("new")], count)]))
        return Interval(name, [result], start, start + 5 * 10**9)

    intervals = [interval("a.otlp", 10**18, 1), interval("b.otlp", 10**18, 50)]
    browser.show_page(page_of(compared_columns(intervals, title="a → b")))
    assert brushed(browser) == "b.otlp · 100 samples, against a.otlp · 51 samples"
    browser.press("3")
    assert rows(browser)[0] == ["new", "50.00%", "+48.04", "50.00%", "+48.04"]
    browser.go_back()
    browser.press("d", "w", "1")
    assert "151 samples" in text(browser, "details")


def test_values_can_be_shown_as_sample_counts_times_or_percentages(page):
    shown = "[...document.getElementById('unit').options].map(option => option.text)"
    assert page.evaluate(shown) == ["samples", "ms of CPU", "%"]
    page.press("u")
    assert text(page, "details") == "all · 1,010 ms, 100.00%"
    page.press("3")
    assert rows(page)[0] == ["ext4_read", "606 ms", "60.00%", "606 ms", "60.00%"]
    page.press("u")
    assert rows(page)[0] == ["ext4_read", "60.00%", "60.00%"]


def test_a_link_restores_the_same_view(page, browser):
    choose(page, "process", "dd")
    page.evaluate("viewer.brush([0, 1000])")
    page.press("2", "/", *"ext4")
    page.click_at(*place(page, "ext4_read"))
    shown, details = boxes(page), text(page, "details")
    link = page.evaluate("location.href")
    browser.open("about:blank")
    browser.open(link)
    browser.evaluate("viewer.panes[0].tellFocused()")
    assert boxes(page) == shown
    assert text(page, "details") == details
    assert page.evaluate("document.getElementById('search').value") == "ext4"
    assert page.evaluate("document.getElementById('process').value") == "dd"
    assert "0.00 s" in text(page, "brushed")


@pytest.mark.parametrize("tab", ["flame", "callers", "table", "sandwich"])
def test_everything_except_the_control_rows_fits_in_a_narrow_window(browser, tab):
    browser.show([PROFILE], f"#tab={tab}", title="a-long-name-of-a-command " * 4, width=400)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    outside = """[...document.querySelectorAll(":is(main, footer, #strip) :is(button, canvas, td)")]
      .filter(one => one.checkVisibility() && one.getBoundingClientRect().right > 401)
      .map(one => one.outerHTML)"""
    assert browser.evaluate(outside) == []


def test_screen_readers_can_read_the_table_and_the_name_of_every_control(page):
    page.press("3")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    results = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree}
    assert {("tab", "Table"), ("columnheader", "Self"), ("button", "ext4_read"),
            ("cell", "60"), ("slider", page.evaluate("document.getElementById('strip').ariaLabel")),
            } <= results  # fmt: skip
    controls = {"button", "combobox", "searchbox", "tab", "slider"}
    assert [role for role, name in results if role in controls and not name] == []


def million_page(tmp_path):
    profile = busy_host(1_000_000, stacks=6000)
    assert profile.sample_count == 1_000_000
    path = tmp_path / "million.html"
    path.write_text(html([profile]))
    return path


FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def timed(browser, expression):
    """Returns the time, in milliseconds, to evaluate an expression and draw its result."""
    return browser.evaluate(
        f"(async () => {{ const start = performance.now(); {expression}; await {FRAMES};"
        "return performance.now() - start; })()"
    )


@pytest.mark.long
def test_a_page_with_a_million_samples_opens_and_filters_without_delay(browser, tmp_path):
    browser.open(million_page(tmp_path).as_uri())
    took = {"open": browser.evaluate("Number(document.documentElement.dataset.openedMs)")}
    assert "1,000,000 samples" in text(browser, "details")
    for tab in ("flame", "callers", "table", "sandwich"):
        timed(browser, f"document.querySelector('[data-tab={tab}]').click()")
        for at in range(3):
            key = f"brush, {tab}"
            range_ms = f"[{8000 + 1000 * at}, {30_000 + 1000 * at}]"
            ms = timed(browser, f"viewer.brush({range_ms})")
            took[key] = min(ms, took.get(key, ms))
    chosen = "(list => { list.value = 'python0'; list.dispatchEvent(new Event('change')) })"
    took["filter"] = timed(browser, f"{chosen}(document.getElementById('process'))")
    print({name: round(ms) for name, ms in took.items()})  # noqa: T201 - for -rP
    assert took.pop("open") < 10_000
    assert max(took.values()) < 2000
