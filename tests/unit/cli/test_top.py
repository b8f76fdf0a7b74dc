"""Tests the effect of key presses on the state and the screen of ``top``, with recorded samples."""

from dataclasses import replace

import click
import pytest

from otel_kprofiler.cli.keys import (
    BACKSPACE,
    DOWN,
    END,
    ENTER,
    ESCAPE,
    HOME,
    LEFT,
    PAGE_DOWN,
    PAGE_UP,
    RIGHT,
    UP,
    KeyParser,
)
from otel_kprofiler.cli.top_page import Size, Status, page, plain_table
from otel_kprofiler.cli.top_state import GROUPING_KEYS, TopState
from otel_kprofiler.cli.top_windows import SlidingWindow
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    PYTHON_SIDE,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    LossCause,
    Module,
    ModuleKind,
    Stack,
    WaitCause,
    WaitState,
    WindowSample,
    WindowWait,
)
from otel_kprofiler.otlp import decode_windows, encode_window
from tests.windows import LIBC, VMLINUX, make_profile, make_window

SECOND = 10**9
START = 1_600_000_000 * SECOND
BPF = Module("bpf_prog_0123456789abcdef_watch", ModuleKind.BPF, None, FileId("ef" * 16), 0)


def stack(*frames):
    return Stack.from_frames(
        Frame(module, 1, (Line(name, file="app.py" if line else "", line=line),), 0, side)
        for side, module, name, line in frames
    )


def kernel(name, module=VMLINUX):
    return KERNEL_SIDE, module, name, 0


NGINX = {"process.pid": 7, "process.executable.name": "nginx"}
MAIN = USER_SIDE, LIBC, "main", 0
READ = stack(kernel("vfs_read"), kernel("__x64_sys_read"), kernel("do_syscall_64"), MAIN)
SEND = stack(kernel("watch", BPF), kernel("__x64_sys_sendto"), kernel("do_syscall_64"), MAIN)
COMPUTE = stack((PYTHON_SIDE, None, "compute", 42), MAIN)


def window(number, *, reads=5, computes=3, sends=2, lost=0):
    """Returns a 1 s window: ``nginx`` reads, its ``sender`` thread sends, and ``evil`` computes."""

    def sample(stack, tid, name, count):
        times = [START + number * SECOND + at for at in range(count)]
        return WindowSample(stack, tid, name, 0, None, times)

    web = {**NGINX, "container.name": "web", "service.name": "shop"}
    evil = {"process.pid": 8, "process.executable.name": "e\x1b[2Jvil\r"}
    groups = [
        (attributes, kept)
        for attributes, samples in [
            (web, [sample(READ, 7, "nginx", reads), sample(SEND, 9, "sender", sends)]),
            (evil, [sample(COMPUTE, 8, "evil", computes)]),
        ]
        if (kept := [one for one in samples if one.timestamps_unix_ns])
    ]
    start, count = START + number * SECOND, reads + computes + sends
    losses = {LossCause.RING_FULL: lost} if lost else {}
    facts = {"period_ns": 10**7, "taken": count + lost, "lost": losses}
    made = make_window(start, start + SECOND, *groups, **facts)
    payloads = [batch.payload for batch in encode_window(made).batches]
    return next(iter(decode_windows(payloads)), made)  # windows without samples are not sent


def filled(*windows, seconds=5.0):
    sliding = SlidingWindow(seconds)
    for one in windows or map(window, range(7)):
        sliding.add(one)
    return sliding


STATUS = Status("host", "6.12", "99 Hz", 0.012)


def screen(state, shown, width=80, height=24, **more):
    """Returns the screen's lines without attributes, and checks that each line fits the width."""
    lines = page(state, shown, STATUS, Size(width, height, **more), color=True)
    plain = [click.unstyle(line) for line in lines]
    assert len(plain) == height
    assert all(len(line) <= width and line.isprintable() for line in plain), plain
    return [line.rstrip() for line in plain]


def selected(state, shown, **size):
    lines = page(state, shown, STATUS, Size(80, 24, **size), color=False)
    rows = [click.unstyle(line) for line in lines if "\x1b[7m" in line]
    rows = [row for row in rows if "ms/s" not in row]
    assert len(rows) <= 1
    return rows[0].split()[-1] if rows else None


def names(state, shown):
    return [group.key.name for section in state.sections(shown) for group in section.groups]


def press(state, shown, *keys):
    for key in keys:
        state.press(key, shown)


def waiting(number):
    """Returns a 1 s window with waits of 3 ms (pipe) and 900 ms (poll), and on-CPU samples."""
    waits = [
        WindowSample(READ, 7, "nginx", 0, None, [START + number * SECOND], [value], (), wait)
        for value, wait in [
            (3_000_000, WindowWait(WaitState.INTERRUPTIBLE, WaitCause.PIPE)),
            (900_000_000, WindowWait(WaitState.INTERRUPTIBLE, WaitCause.POLL)),
        ]
    ]
    made = window(number)
    profile = make_profile((NGINX, waits), kind=OFF_CPU, period_ns=0, taken=2)
    return replace(made, profiles=[*made.profiles, profile])


@pytest.mark.parametrize(
    ("idle", "expected"), [(False, {"pipe": 15.0}), (True, {"poll": 4500.0, "pipe": 15.0})]
)
def test_grouping_waits_by_cause_excludes_idle_waits_by_default(idle, expected):
    sliding = SlidingWindow(5, OFF_CPU, idle=idle)
    for number in range(5):
        sliding.add(waiting(number))
    state, shown = TopState(), sliding.shown()
    press(state, shown, "w")
    (section,) = state.sections(shown)
    assert {group.key.name: group.own / 1e6 for group in section.groups} == expected


def test_top_shows_and_retains_only_the_last_few_seconds():
    sliding = filled(*(window(number, reads=number) for number in range(20)))
    shown = sliding.shown()
    assert shown.seconds == 5
    assert shown.samples == sum(range(15, 20)) + 5 * 5
    assert len(sliding._parts) == 5


def test_rows_show_percentages_and_milliseconds_per_second():
    lines = screen(TopState(), filled().shown())
    assert lines[0] == "host  6.12  99 Hz  5.0 s  10 samples/s  lost 0  own 1.2%"
    assert lines[1].split() == ["[self]", "total", "ms/s", "module", "function"]
    assert lines[2].split() == ["50.0%", "50.0%", "50.0", "vmlinux", "vfs_read"]
    lines = screen(TopState(order="total"), filled().shown())
    assert lines[2].split() == ["0.0%", "100.0%", "100.0", "libc.so.6", "main"]


@pytest.mark.parametrize(
    ("key", "title", "row"),
    [
        ("f", "function", "50.0% 50.0% 50.0 vmlinux vfs_read"),
        ("p", "process", "70.0% 100% 70.0 nginx (7)"),
        ("t", "thread", "50.0% 100% 50.0 nginx (7) nginx (7)"),
        ("s", "kernel entry", "50.0% 50.0 read"),
        ("c", "container", "70.0% 100% 70.0 web"),
        ("m", "module", "50.0% 70.0% 50.0 vmlinux"),
        ("l", "line of code", "70.0% 70.0% 70.0 [no line]"),
        ("b", "function of a BPF program", "20.0% 20.0% 20.0 0123456789abcdef watch"),
        ("v", "service", "70.0% 100% 70.0 shop"),
    ],
)
def test_each_grouping_can_be_selected_with_a_key(key, title, row):
    state, shown = TopState("cpu" if key == "f" else "function"), filled().shown()
    press(state, shown, key)
    lines = screen(state, shown)
    assert lines[1].endswith(title)
    assert " ".join(lines[2].split()).startswith(row)


def test_arrow_keys_cycle_through_all_groupings():
    state, shown = TopState(), filled().shown()
    seen = []
    for _ in GROUPING_KEYS:
        seen.append(state.level.view.by)
        press(state, shown, RIGHT)
    assert seen == list(GROUPING_KEYS.values())
    assert state.level.view.by == "function"
    press(state, shown, LEFT)
    assert state.level.view.by == "service"


def test_rows_can_be_sorted_by_self_or_total_time():
    state, shown = TopState(), filled().shown()
    assert names(state, shown)[0] == "vfs_read"
    press(state, shown, "T")
    assert names(state, shown)[:2] == ["main", "do_syscall_64"]
    press(state, shown, "S")
    assert names(state, shown)[0] == "vfs_read"


def test_a_frozen_screen_does_not_change_while_samples_arrive():
    sliding, state = filled(), TopState()
    press(state, sliding.shown(), " ")
    before = screen(state, sliding.shown())
    assert before[0].startswith("FROZEN  host")
    for number in range(7, 20):
        sliding.add(window(number, computes=50))
    assert screen(state, sliding.shown()) == before
    press(state, sliding.shown(), "p")  # keys change only the view, not the time range
    assert names(state, sliding.shown())[0] == "nginx (7)"
    press(state, sliding.shown(), "f", " ")
    assert screen(state, sliding.shown())[2].endswith("compute")
    assert "FROZEN" not in screen(state, sliding.shown())[0]


def test_a_filter_can_be_typed_edited_applied_and_removed():
    state, shown = TopState(), filled().shown()
    everything = names(state, shown)
    press(state, shown, "/", *"SYSx", BACKSPACE)
    assert screen(state, shown)[-1] == "/SYS"
    wanted = ["__x64_sys_sendto", "__x64_sys_read", "do_syscall_64"]
    assert sorted(names(state, shown)) == sorted(wanted)
    press(state, shown, ENTER, "T")  # after Enter, T is a command again
    assert names(state, shown) == ["do_syscall_64", "__x64_sys_read", "__x64_sys_sendto"]
    assert screen(state, shown)[-1].startswith("/SYS  ")
    press(state, shown, "S", ESCAPE)
    assert names(state, shown) == everything
    press(state, shown, "/", *"libc", ENTER)  # matches a module
    assert names(state, shown) == ["main"]
    press(state, shown, "/", ESCAPE, "/", *"q!", ENTER)
    assert "no row matches" in screen(state, shown)[2]
    assert not state.has_quit


def test_the_selection_follows_the_selected_row_when_rows_move():
    sliding, state = filled(), TopState()
    assert selected(state, sliding.shown()) is None
    press(state, sliding.shown(), DOWN, DOWN)
    assert selected(state, sliding.shown()) == "compute"
    for number in range(7, 12):
        sliding.add(window(number, computes=50))
    assert names(state, sliding.shown())[0] == "compute"
    assert selected(state, sliding.shown()) == "compute"
    for number in range(12, 17):
        sliding.add(window(number, computes=0))
    assert "compute" not in names(state, sliding.shown())
    assert selected(state, sliding.shown()) == "vfs_read"  # the row that replaced `compute`
    press(state, sliding.shown(), END)
    assert selected(state, sliding.shown()) == names(state, sliding.shown())[-1]
    press(state, sliding.shown(), UP, HOME, UP)
    assert selected(state, sliding.shown()) == "vfs_read"


def test_the_selected_row_is_always_visible():
    state, shown = TopState(), filled().shown()
    everything = names(state, shown)
    for key in [DOWN] * 9 + [PAGE_UP] * 4 + [PAGE_DOWN] * 4 + [END, HOME]:
        press(state, shown, key)
        row = state.selected_row(state.sections(shown))
        assert selected(state, shown, rows=2) == everything[row]
        assert state.page == 2
    assert row == 0


def test_enter_shows_callers_and_callees_and_escape_goes_back():
    state, shown = TopState(), filled().shown()
    press(state, shown, "/", *"do_sys", ENTER, DOWN, ENTER)
    assert names(state, shown) == ["main", "__x64_sys_read", "__x64_sys_sendto"]
    lines = screen(state, shown)
    assert lines[1] == "do_syscall_64: 70.0% of all"
    assert lines[2].endswith("callers of do_syscall_64")
    assert lines[3].split() == ["100.0%", "70.0", "libc.so.6", "main"]
    assert lines[4].endswith("callees of do_syscall_64")
    assert lines[5].split() == ["71.4%", "50.0", "vmlinux", "__x64_sys_read"]
    press(state, shown, DOWN, DOWN, ENTER)  # opens a callee
    assert names(state, shown) == ["do_syscall_64", "vfs_read"]
    press(state, shown, ESCAPE)
    assert selected(state, shown) == "__x64_sys_read"
    press(state, shown, ESCAPE)
    assert screen(state, shown)[2].endswith("do_syscall_64")  # the filter is restored


def test_enter_on_a_process_or_system_call_shows_its_functions():
    state, shown = TopState(), filled().shown()
    press(state, shown, "p", DOWN, ENTER)
    assert screen(state, shown)[1] == "process nginx (7): 70.0% of all"
    assert names(state, shown)[0] == "vfs_read"
    assert "compute" not in names(state, shown)
    press(state, shown, "s", DOWN, ENTER)
    assert names(state, shown)[0] == "vfs_read"
    assert "watch" not in names(state, shown)
    press(state, shown, ENTER, "t")  # shows the function's threads
    assert names(state, shown) == ["nginx (7)"]
    press(state, shown, ESCAPE, ESCAPE, ESCAPE, ESCAPE, ESCAPE)
    assert "e\x1b[2Jvil\r (8)" in names(state, shown)


def test_a_row_that_is_not_a_function_has_no_callers():
    state, shown = TopState(), filled().shown()
    press(state, shown, ENTER)
    assert names(state, shown) == ["__x64_sys_read", "[itself]"]
    press(state, shown, END, ENTER)
    assert names(state, shown) == ["__x64_sys_read", "[itself]"]


def test_an_empty_screen_shows_a_note_and_accepts_all_keys():
    for shown in (
        SlidingWindow(5).shown(),
        filled(window(0, reads=0, computes=0, sends=0)).shown(),
    ):
        state = TopState()
        assert screen(state, shown)[2] in ("no samples yet", "nothing ran")
        press(state, shown, DOWN, UP, PAGE_DOWN, END, ENTER, "T", "b", ENTER, ESCAPE, " ")
        assert screen(state, shown)[2] == "no BPF program ran"


def test_losses_are_shown_by_cause_even_on_narrow_screens():
    shown = filled(window(0, lost=12)).shown()
    assert "lost 12 ring_full" in screen(TopState(), shown)[0]
    state = TopState()
    press(state, shown, " ")
    assert screen(state, shown, 30, 8)[0] == "FROZEN  1 s  lost 12  own 1.2%"
    assert screen(TopState(), shown, 12, 3)[0] == "lost 12"


@pytest.mark.parametrize("key", [*GROUPING_KEYS, "h", "/"])
@pytest.mark.parametrize("size", [(80, 24), (30, 8), (20, 3), (1, 1), (200, 60)])
@pytest.mark.parametrize("then", [[], [ENTER], [ENTER, ENTER], [ENTER, "p", ENTER]])
def test_every_page_fits_on_a_screen_of_any_size(key, size, then):
    state, shown = TopState(), filled().shown()
    press(state, shown, DOWN, key, *then)
    screen(state, shown, *size)


def test_the_help_lists_every_key_on_a_screen_of_any_size():
    for size in ((80, 24), (30, 8)):
        state, shown = TopState(), filled().shown()
        press(state, shown, "h")
        text = "\n".join(screen(state, shown, *size))
        for word in ("functions", "processes", "threads", "system calls", "containers", "modules",
                     "lines", "BPF", "filter", "freeze", "Enter", "Esc", "q"):  # fmt: skip
            assert word in text, (word, text)
        press(state, shown, "x")
        assert screen(state, shown)[2].endswith("vfs_read")


def test_process_names_are_escaped_before_they_reach_the_terminal():
    state, shown = TopState(), filled().shown()
    press(state, shown, "p")
    assert screen(state, shown)[3].endswith("e\\x1b[2Jvil\\r (8)")
    assert plain_table(state, shown, STATUS, 5)[3].endswith("e\\x1b[2Jvil\\r (8)")
    press(state, shown, "/", "\u202e")
    assert "\\u202e" in screen(state, shown)[-1]


def test_a_screen_that_could_not_be_refreshed_is_marked_as_stale():
    status = Status("clickhouse://db:8123/otel", "", "on_cpu", is_stale=True)
    head, *_ = page(TopState(), filled().shown(), status, Size(80, 24), color=False)
    assert click.unstyle(head).startswith("STALE  clickhouse://db:8123/otel  on_cpu  ")


def test_bold_and_reverse_are_kept_without_color():
    state, shown = TopState(), filled(window(0, lost=1)).shown()
    press(state, shown, " ")
    drawn = ["".join(page(state, shown, STATUS, Size(80, 24), color=color)) for color in (0, 1)]
    assert ["\x1b[31m" in text or "\x1b[33m" in text for text in drawn] == [False, True]
    assert all("\x1b[1m" in text and "\x1b[7m" in text for text in drawn)


def test_the_number_of_rows_can_be_limited():
    lines = screen(TopState(), filled().shown(), rows=2)
    assert lines[2:5] == [*lines[2:4], ""]
    assert all(lines[2:4])


def test_key_sequences_may_be_split_across_reads():
    parser = KeyParser()
    data = "p\x1b[A\x1bOBé\r\x7f\x1b[5~\x1b[H\x1b[1;5C\x1b[200~\x0b/".encode()
    expected = ["p", UP, DOWN, "é", ENTER, BACKSPACE, PAGE_UP, HOME, RIGHT, "/"]
    assert parser.feed(data) == expected
    assert [key for byte in data for key in parser.feed(bytes([byte]))] == expected
    assert not parser.is_waiting


def test_a_lone_escape_byte_is_interpreted_as_the_escape_key():
    parser = KeyParser()
    assert parser.feed(b"\x1b") == []
    assert parser.is_waiting
    assert parser.flush() == [ESCAPE]
    assert parser.feed(b"\x1bq") == [ESCAPE, "q"]
    assert parser.feed(b"\x1b[" + b"0" * 100) != []  # an overlong sequence is not buffered
    assert not parser.is_waiting
