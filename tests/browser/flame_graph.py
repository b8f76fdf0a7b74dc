"""A test profile, and functions that operate the flame graph page and read its contents."""

import time

from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window

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
    named = (
        ({"process.pid": pid, "process.executable.name": name}, samples)
        for name, pid, samples in groups
    )
    return make_window(10**18, 10**18 + 5 * 10**9, *named, period_ns=10_101_010)


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
BOXES = """viewer.panes[0].graph.boxes().map(({ box, ...shown }) => ({
  ...shown, share: Math.round(100 * shown.width / viewer.panes[0].graph.element.clientWidth),
}))"""


def boxes(page, name=None):
    return [box for box in page.evaluate(BOXES) if name in (None, box["name"])]


def names(page):
    """Returns each drawn box's width by name, as a percentage of the graph's width."""
    return {box["name"]: box["share"] for box in boxes(page)}


def text(page, name):
    return page.evaluate(f"document.getElementById('{name}').textContent")


def fill(page, name):
    return boxes(page, name)[0]["colour"]


def corner(page):
    """Returns the viewport coordinates of the graph's top-left corner."""
    return page.evaluate("(b => [b.x, b.y])(viewer.panes[0].graph.element.getBoundingClientRect())")


def place(page, name):
    """Returns the window coordinates of a box's center."""
    box, (left, top) = boxes(page, name)[0], corner(page)
    return left + box["x"] + box["width"] / 2, top + box["y"] + box["height"] / 2


def hover(page, name):
    for _ in range(40):
        x, y = place(page, name)
        for by in (1, 0):
            page.mouse("mouseMoved", x + by, y)
        if text(page, "details").startswith(name):
            return
        time.sleep(0.05)


def binary(name):
    return Module(name, ModuleKind.USER, None, FileId("5" * 32), 0)


def user(name, module):
    return Frame(module, len(name), (Line(name),), 0, USER_SIDE)


def open_binaries(browser, names, **view):
    """Opens a page with one function per binary. The first binary has the most samples."""
    stacks = [
        sample([user(f"in_{name}", binary(name)), USER], 10 * (len(names) - at))
        for at, name in enumerate(names)
    ]
    unnamed = Frame(binary(names[0]), 9, (), 0, USER_SIDE, Unresolved.USER_ADDRESS)
    stacks.append(sample([SYSCALL, EXT4_READ, BPF, HANDLER, unnamed], 5))
    browser.show([window(("x", 1, stacks))], **view)
    return [fill(browser, f"in_{name}") for name in names]


PYTHON = "View.get (views.py:42)"
LIBRARIES = [f"lib{number}.so" for number in range(12)]
HOSTILE = "<img src=x onerror=window.harmed=1>"


def choose(page, name, label):
    page.evaluate(
        f"(list => {{ list.value = [...list.options].find(o => o.text.startsWith('{label}')).value;"
        f"list.dispatchEvent(new Event('change')) }})(document.getElementById('{name}'))"
    )


def rows(page, table="functions"):
    """Returns the cells in each row of a table, without the module in the first column."""
    return page.evaluate(
        f"[...viewer.panes[0].{table}.body.rows].map(row => [...row.cells].map(cell =>"
        "(cell.querySelector('button, span') ?? cell).textContent))"
    )


def sort(page, heading):
    page.evaluate(
        "[...document.querySelectorAll('th button')]"
        f".find(button => button.textContent === '{heading}').click()"
    )


DASH = "\N{EN DASH}"


def brushed(page):
    return text(page, "brushed").replace(DASH, "-")


def go(browser, address):
    browser.evaluate(
        "new Promise(done => { addEventListener('popstate', () => done(), { once: true });"
        f"location.hash = '{address}' }})"
    )
