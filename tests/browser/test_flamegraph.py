"""The flame graph page in a real browser: what it shows, how it is used, how fast it opens."""

import pytest

from otel_kprofiler.formats import html
from otel_kprofiler.model import (
    KERNEL_SIDE,
    ON_CPU,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Unresolved,
    Window,
    WindowSample,
)

VMLINUX = Module("vmlinux", ModuleKind.VMLINUX, None, FileId("0" * 32), 0)
EXT4 = Module("ext4", ModuleKind.LOADED, None, FileId("1" * 32), 0)
PROGRAM = Module("bpf_prog_1", ModuleKind.BPF, None, FileId("34" * 16), 0xFFFFFFFFC1000000)


def frame(name, module=VMLINUX):
    return Frame(module, len(name), (Line(name),), 0, KERNEL_SIDE)


SYSCALL, READ = frame("do_syscall_64"), frame("vfs_read")
EXT4_READ = frame("ext4_read", EXT4)
BPF = frame("bpf_prog_1", PROGRAM)
GAP = Frame(VMLINUX, 0x300, (), 0, KERNEL_SIDE, Unresolved.NO_SYMBOL)
HANDLER = Frame(None, 0, (Line("View.get", "", "/srv/app/views.py", 42, 40),), 0, PYTHON_SIDE)
USER = Frame(None, 0x401000, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)


def window(*groups):
    return Window(10**18, 10**18 + 5 * 10**9, [Profile(ON_CPU, 10_101_010, [
        ResourceSamples(Resource({"process.pid": pid, "process.executable.name": name}), samples)
        for name, pid, samples in groups
    ])])  # fmt: skip


def sample(frames, count, tid=1, cpu=0):
    return WindowSample(
        Stack.from_frames(tuple(frames)), tid, "thread</script>", cpu, None, range(count)
    )


PROFILE = window(
    ("dd", 7, [
        sample([EXT4_READ, READ, SYSCALL, USER], 60, tid=7),
        sample([READ, SYSCALL], 10, tid=8, cpu=1),
    ]),
    ("dd", 9, [sample([BPF, SYSCALL], 5, tid=9)]),
    ("sh", 5, [sample([GAP, SYSCALL], 25, tid=5, cpu=1)]),
)  # fmt: skip


@pytest.fixture
def page(browser, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(html([PROFILE], title="A & B"))
    browser.open(path.as_uri())
    return browser


def names(page):
    """Names of the drawn frames and their widths in percent of the chart."""
    return dict(
        page.evaluate(
            "(whole => [...document.querySelectorAll('g.frame')].map(g => [g.getAttribute('name'),"
            "Math.round(100 * g.getAttribute('width') / whole)]))"
            "(document.getElementById('chart').clientWidth)"
        )
    )


def text(page, name):
    return page.evaluate(f"document.getElementById('{name}').textContent")


def fill(page, name):
    return page.evaluate(
        "getComputedStyle([...document.querySelectorAll('g.frame')].find(g =>"
        f"g.getAttribute('name') === '{name}').querySelector('rect')).fill"
    )


def node_id(page, name):
    return page.evaluate(f"'#' + document.querySelector('g.frame[name=\"{name}\"]').id")


def test_everything_is_drawn_in_proportion_and_nothing_is_fetched(page):
    drawn = names(page)
    for ambiguous in ("do_syscall_64", "vfs_read"):  # drawn more than once
        assert drawn.pop(ambiguous)
    assert drawn == {
        "all": 100, "dd": 75, "sh": 25, "[0x401000]": 60, "ext4_read": 60, "bpf_prog_1": 5,
        "[vmlinux+0x300]": 25,
    }  # fmt: skip
    assert [url[:5] for url in page.requests] == ["file:"]
    assert page.evaluate("document.title") == "A & B"
    assert "100 samples · 2 CPUs · 5.0 s" in page.evaluate("document.body.textContent")


def test_kinds_have_colours_and_gaps_are_hatched_with_their_reason_on_hover(page):
    colours = [fill(page, name) for name in ("do_syscall_64", "ext4_read", "bpf_prog_1", "dd")]
    assert len(set(colours)) == 4
    assert all(colour.startswith("rgb") for colour in colours)
    assert fill(page, "[vmlinux+0x300]") == 'url("#hatch-kernel")'
    assert fill(page, "[0x401000]") == 'url("#hatch-user")'
    page.mouse("mouseMoved", node_id(page, "[vmlinux+0x300]"))
    details = text(page, "details")
    assert "unresolved: the address lies between the symbols of its module" in details
    assert "25 samples, 25.00%" in details


def binary(name):
    return Module(name, ModuleKind.USER, None, FileId("5" * 32), 0)


def user(name, module):
    return Frame(module, len(name), (Line(name),), 0, USER_SIDE)


def open_binaries(browser, tmp_path, names, **view):
    """A page with a function of each binary, those of the first with the most samples."""
    path = tmp_path / "binaries.html"
    stacks = [
        sample([user(f"in_{name}", binary(name)), USER], 10 * (len(names) - at))
        for at, name in enumerate(names)
    ]
    unnamed = Frame(binary(names[0]), 9, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)
    stacks.append(sample([SYSCALL, EXT4_READ, BPF, HANDLER, unnamed], 5))
    path.write_text(html([window(("x", 1, stacks))]))
    browser.open(path.as_uri(), **view)
    return [fill(browser, f"in_{name}") for name in names]


PYTHON = "View.get (views.py:42)"
LIBRARIES = [f"lib{number}.so" for number in range(12)]


def test_user_code_is_coloured_by_binary_and_the_legend_says_so(browser, tmp_path):
    colours = open_binaries(browser, tmp_path, LIBRARIES)
    kinds = [fill(browser, name) for name in ("do_syscall_64", "ext4_read", "bpf_prog_1", "x")]
    assert len({*colours, *kinds, fill(browser, PYTHON)}) == 17
    assert fill(browser, "[lib0.so+0x9]").startswith('url("#hatch-user-')
    assert fill(browser, "[0x401000]") == 'url("#hatch-user")'
    legend = "[...document.querySelectorAll('#binaries li')].map(item => item.textContent)"
    assert browser.evaluate(legend) == LIBRARIES[:8]
    for name in ("binaries", "legend"):
        assert browser.evaluate(f"document.getElementById('{name}').getBoundingClientRect().height")


def test_python_frames_show_their_line_and_on_hover_the_whole_path(browser, tmp_path):
    open_binaries(browser, tmp_path, LIBRARIES)
    browser.mouse("mouseMoved", node_id(browser, PYTHON))
    assert text(browser, "details").startswith(f"{PYTHON} · in /srv/app/views.py · 5 samples")


def test_a_binary_has_the_same_colour_in_every_profile(browser, tmp_path):
    alone = [open_binaries(browser, tmp_path, [name])[0] for name in LIBRARIES[:3]]
    assert alone == [open_binaries(browser, tmp_path, [name, "z"])[0] for name in LIBRARIES[:3]]
    assert len(open_binaries(browser, tmp_path, [f"x{n}" for n in range(20)])) == 20
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
  return [...document.querySelectorAll("g.frame")].flatMap((group) => {
    const fill = getComputedStyle(group.querySelector("rect")).fill;
    if (fill.startsWith("url")) return [];
    const both = [fill, getComputedStyle(group.querySelector("div")).color].map(luminance);
    return [(Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)];
  });
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_can_be_read_on_every_colour(browser, tmp_path, scheme):
    open_binaries(browser, tmp_path, [f"x{number}" for number in range(40)], scheme=scheme)
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert min(contrasts) > 4.5


def test_search_marks_frames_and_says_their_share(page):
    page.press("/")
    page.press(*"EXT4|bpf")
    assert text(page, "matched") == "matched 65.00%, 65 samples"
    assert fill(page, "ext4_read") == fill(page, "bpf_prog_1")
    page.evaluate("document.getElementById('search').value = '('")
    page.press("(")
    assert text(page, "matched") == "matched 0.00%, 0 samples"


def test_zoom_by_click_and_back_by_key(page):
    page.click(node_id(page, "sh"))
    assert names(page) == {"all": 100, "sh": 100, "do_syscall_64": 100, "[vmlinux+0x300]": 100}
    page.press("r")
    assert names(page)["sh"] == 25


def test_keyboard_alone_walks_zooms_and_inverts(page):
    page.evaluate("document.getElementById('chart').focus()")
    page.press("ArrowUp")
    assert text(page, "details").startswith("dd · 75 samples")
    page.press("ArrowRight")
    assert text(page, "details").startswith("sh · 25 samples")
    page.press("ArrowUp", "Enter")
    assert names(page)["do_syscall_64"] == 100
    page.press("Escape", "i", "ArrowDown")
    assert text(page, "details").startswith("dd")
    top = "document.querySelector('g.frame[name=\"{}\"]').getBoundingClientRect().y"
    assert page.evaluate(top.format("all")) < page.evaluate(top.format("sh"))
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") != "chart"


def choose(page, name, label):
    page.evaluate(
        f"(list => {{ list.value = [...list.options].find(o => o.text.startsWith('{label}')).value;"
        f"list.dispatchEvent(new Event('change')) }})(document.getElementById('{name}'))"
    )


def test_filters_by_process_thread_and_cpu(page):
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


def test_light_and_dark_follow_the_system_and_the_key(page, browser, tmp_path):
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.press("t")
    dark = page.evaluate(back)
    assert light != dark
    browser.open((tmp_path / "x.html").as_uri(), scheme="dark")
    assert page.evaluate(back) == dark
    page.press("t")
    assert page.evaluate(back) == light


def test_no_samples_is_said(browser, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(html([]))
    browser.open(path.as_uri())
    assert browser.evaluate("document.getElementById('empty').hidden") is False


def million_samples():
    """40,000 stacks of 3 to 40 frames that share their roots, on 8 CPUs."""
    frames = [frame(f"function_{number}") for number in range(5000)]
    found = []
    for number in range(40_000):
        depth = 3 + number % 38
        stack = [frames[(number >> max(0, 15 - level)) * 7 % 5000] for level in range(depth)]
        found.append(sample(reversed(stack), 25, tid=number % 300, cpu=number % 8))
    return window(("busy", 1, found))


def test_a_million_samples_open_in_two_seconds(browser, tmp_path):
    path = tmp_path / "million.html"
    profile = million_samples()
    assert profile.sample_count == 1_000_000
    path.write_text(html([profile]))
    took = []
    for _ in range(3):  # the machine may have other things to do
        browser.open(path.as_uri())
        took.append(browser.evaluate("Number(document.documentElement.dataset.openedMs)"))
    assert "1,000,000 samples" in text(browser, "details")
    assert min(took) < 2000
