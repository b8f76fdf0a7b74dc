"""The page's stack transforms match the same rules applied to each stack individually."""

import random
from collections import Counter

import pytest

from otel_kprofiler.model import PYTHON_SIDE, USER_SIDE, Frame, Line
from tests.browser.flame_graph import (
    BPF,
    HANDLER,
    HOSTILE,
    READ,
    SYSCALL,
    binary,
    go,
    hover,
    names,
    place,
    rows,
    sample,
    text,
    window,
)

STACKS = """(() => {
  const profile = viewer.profile(), found = [];
  const threads = new Uint8Array(profile.threads.tid.length).fill(1);
  const counts = profile.count({ kind: 0, cpu: null, threads });
  const walk = (node, names) => {
    const path = [...names, profile.name(profile.nodes.frame[node])];
    if (counts.own[node]) found.push([path, counts.own[node]]);
    let below = counts.own[node];
    for (const child of profile.children(node)) below += walk(child, path);
    if (below !== counts.total[node]) throw new Error(`${path}: ${below}, ${counts.total[node]}`);
    return below;
  };
  let all = 0;
  for (const root of profile.children(-1)) all += walk(root, []);
  if (all !== counts.all) throw new Error(`${all} of ${counts.all}`);
  const functions = profile.functionCounts(counts);
  const byName = valueOf => Object.fromEntries(
    profile.functions.map((one, at) => [profile.name(one.frame), valueOf(one, at)]));
  return {
    stacks: found,
    own: byName((_, at) => functions.own[at]),
    total: byName((_, at) => functions.total[at]),
    ids: byName(({ id }) => id),
    grid: profile.grid({ kind: 0, cpu: null, threads }).reduce((sum, value) => sum + value, 0),
  };
})()"""  # fmt: skip


def native(name, module="server", line=0):
    return Frame(binary(module), line, (Line(name, "", "", line),), 0, USER_SIDE)


def python(name):
    return Frame(None, 0, (Line(name, "", "/srv/app.py", 9),), 0, PYTHON_SIDE)


RUNTIME = {"eval": "libpython3.13.so.1.0", "call": "python3.13", "memcpy": "libc.so.6",
           "start": "ld-linux-x86-64.so.2"}  # fmt: skip
FUNCTIONS = [
    SYSCALL, READ, BPF,
    *(native(name, module) for name, module in RUNTIME.items()),
    *(native(name, line=line) for name in ("main", "walk", "parse") for line in (3, 4)),
    python("get"), python("put"),
]  # fmt: skip


def name_of(frame):
    name = frame.lines[0].function
    return f"{name} (app.py:9)" if frame.side is PYTHON_SIDE else name


def oracle(stack, transform):
    """Transforms a stack whose first element is its process. Returns None for dropped stacks."""
    process, *names = stack
    kind, _, chosen = transform.partition(" ")
    if kind == "application":
        names = [name for name in names if name not in RUNTIME]
    elif kind == "merge":
        names = [name for name in names if name != chosen]
    elif kind == "hide":
        return None if chosen in names else stack
    elif kind == "focus":
        if chosen not in names:
            return None
        names = names[names.index(chosen) :]
    elif kind == "collapse" and chosen in names:
        last = len(names) - 1 - names[::-1].index(chosen)
        names = names[: names.index(chosen)] + names[last:]
    elif kind == "recursion":
        names = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    return (process, *names)


def address(transforms, ids):
    return ".".join(
        "-".join([kind, ids[chosen]] if chosen else [kind])
        for kind, _, chosen in (text.partition(" ") for text in transforms)
    )


def shown(browser, transforms, ids):
    go(browser, f"transforms={address(transforms, ids)}&x={random.random()}")
    return browser.evaluate(STACKS)


@pytest.mark.parametrize("seed", range(6))
def test_every_transform_preserves_exact_sums(browser, seed):
    rng = random.Random(seed)
    groups, stacks = [], Counter()
    for process in ("one", "two"):
        pool = rng.sample(FUNCTIONS, rng.randint(3, len(FUNCTIONS)))
        samples = []
        for _ in range(40):
            frames = [rng.choice(pool) for _ in range(rng.randint(1, 9))]
            count = rng.randint(1, 9)
            samples.append(sample(frames, count))
            stacks[(process, *(name_of(frame) for frame in reversed(frames)))] += count
        groups.append((process, len(groups) + 1, samples))
    browser.show([window(*groups)])
    ids = browser.evaluate(STACKS)["ids"]
    present = sorted({name for stack in stacks for name in stack[1:]})
    for _ in range(40):
        transforms = []
        for _ in range(rng.randint(0, 4)):
            kind = rng.choice(
                ["application", "recursion", *["merge", "hide", "focus", "collapse"] * 2]
            )
            toggles = kind in ("application", "recursion")
            transforms.append(kind if toggles else f"{kind} {rng.choice(present)}")
        wanted = Counter(stacks)
        for transform in transforms:
            left = Counter()
            for stack, count in wanted.items():
                if (after := oracle(stack, transform)) is not None:
                    left[after] += count
            wanted = left
        sums = shown(browser, transforms, ids)
        got = Counter()
        for stack, count in sums["stacks"]:
            assert tuple(stack) not in got, (transforms, stack)
            got[tuple(stack)] = count
        assert got == wanted, transforms
        assert sums["grid"] == wanted.total(), transforms
        for name in present:
            leaf = sum(count for stack, count in wanted.items() if stack[-1] == name)
            total = sum(count for stack, count in wanted.items() if name in stack)
            assert (sums["own"][name], sums["total"][name]) == (leaf, total), (transforms, name)


@pytest.mark.parametrize(("module", "is_runtime"), [
    ("libc.so.6", True), ("libc-2.31.so", True), ("libc.musl-x86_64.so.1", True),
    ("ld-linux-x86-64.so.2", True), ("ld-musl-x86_64.so.1", True), ("libpthread.so.0", True),
    ("python3.13", True), ("python3.14t", True), ("libpython3.11.so.1.0", True),
    ("/usr/bin/python3", True), ("libc.so.6 (deleted)", True),
    ("libcrypto.so.3", False), ("libcurl.so.4", False),
    ("_json.cpython-313-x86_64-linux-gnu.so", False),
    ("python3.13-service", False), ("libldap.so.2", False), ("ld", False), ("server", False),
])  # fmt: skip
def test_the_application_transform_hides_only_python_and_libc_frames(browser, module, is_runtime):
    browser.show([window(("x", 1, [sample([SYSCALL, native("leaf", module), HANDLER], 5)]))])
    browser.press("a")
    assert ("leaf" not in names(browser)) is is_runtime
    assert "do_syscall_64" in names(browser)


def chips(browser):
    return browser.evaluate(
        "[...document.querySelectorAll('#transforms button')].map(one => one.textContent)"
    )


def test_shortcut_keys_transform_the_focused_function_and_breadcrumbs_undo_the_transform(page):
    hover(page, "ext4_read")
    page.press("m")
    assert "ext4_read" not in names(page)
    assert chips(page) == ["merged ext4_read ✕"]
    hover(page, "do_syscall_64")
    page.press("f")
    assert "[0x401000]" not in names(page)
    hover(page, "bpf_prog_1")
    page.press("h")
    assert "95 samples" in text(page, "details")
    assert chips(page) == ["merged ext4_read ✕", "focus do_syscall_64 ✕", "without bpf_prog_1 ✕"]
    address = page.evaluate("location.href")
    page.evaluate("document.querySelectorAll('#transforms button')[1].focus()")
    page.press("Enter")
    assert chips(page) == ["merged ext4_read ✕", "without bpf_prog_1 ✕"]
    assert page.evaluate("document.activeElement.textContent") == "without bpf_prog_1 ✕"
    page.press("z", "z")
    assert names(page)["ext4_read"] == 60
    page.open("about:blank")
    page.open(address)
    assert chips(page) == ["merged ext4_read ✕", "focus do_syscall_64 ✕", "without bpf_prog_1 ✕"]
    assert "95 samples" in text(page, "details")


MENU = (
    "[...document.querySelectorAll('#menu [role=menuitem]')].map(one => one.firstChild.textContent)"
)


def right_click(page, name):
    page.click_at(*place(page, name), "right")


def test_a_frames_context_menu_works_with_mouse_and_keyboard(page):
    right_click(page, "vfs_read")
    assert page.evaluate("document.querySelector('#menu strong').textContent") == "vfs_read"
    assert len(page.evaluate(MENU)) >= 6
    page.press("ArrowDown", "Enter")
    assert chips(page) == ["merged vfs_read ✕"]
    assert page.evaluate("document.activeElement.className") == "graph"
    right_click(page, "ext4_read")
    page.press("Escape")
    assert page.evaluate("document.getElementById('menu').hidden")
    right_click(page, "ext4_read")
    page.press("h")
    assert names(page)["sh"] == 63
    right_click(page, "all")
    assert page.evaluate("document.getElementById('menu').hidden")


def test_table_rows_and_the_button_below_the_graph_open_the_menu(page):
    hover(page, "ext4_read")
    page.click("#more")
    page.press("f")
    assert chips(page) == ["focus ext4_read ✕"]
    page.press("z", "3")
    row = "document.querySelector('tr[data-id] button')"
    page.evaluate(
        f"{row}.focus(), {row}.dispatchEvent(new MouseEvent('contextmenu', {{bubbles: true}}))"
    )
    page.press("m")
    assert chips(page) == ["merged ext4_read ✕"]
    assert "ext4_read" not in [row[0] for row in rows(page)]


def test_collapsed_recursion_is_shown_as_one_frame(browser):
    walk, parse = native("walk"), native("parse", line=7)
    browser.show([window(("x", 1, [sample([READ, walk, walk, parse, walk, walk], 4)]))])
    names = "viewer.panes[0].graph.boxes().map(box => box.name)"
    assert len(browser.evaluate(names)) == 8
    browser.press("e")
    assert browser.evaluate(names) == ["all", "x", "walk", "parse", "walk", "vfs_read"]
    hover(browser, "walk")
    browser.press("o")
    assert browser.evaluate(names) == ["all", "x", "walk", "vfs_read"]
    assert chips(browser) == ["collapsed walk ✕"]
    assert (
        browser.evaluate("document.getElementById('recursion').getAttribute('aria-pressed')")
        == "true"
    )


def test_html_in_names_is_escaped_in_the_menu_and_the_breadcrumb(browser):
    browser.show([window(("x", 1, [sample([native(HOSTILE, HOSTILE)], 5)]))])
    right_click(browser, HOSTILE)
    assert browser.evaluate("document.querySelector('#menu strong').textContent") == HOSTILE
    browser.press("h")
    assert chips(browser) == [f"without {HOSTILE} ✕"]
    assert browser.evaluate("document.querySelector('.empty').checkVisibility()")
    assert browser.evaluate("document.images.length") == 0
