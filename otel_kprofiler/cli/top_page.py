"""Formats the ``top`` page as lines of text, for terminals of any size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import basename
from typing import Final

import click

from otel_kprofiler.analysis import Group
from otel_kprofiler.cli.columns import Column, layout
from otel_kprofiler.cli.report_table import FRAMES
from otel_kprofiler.cli.top_state import Section, TopState
from otel_kprofiler.cli.top_windows import CALLEES, CALLERS, Shown, View
from otel_kprofiler.model import Losses
from otel_kprofiler.text import cut, escape_controls

_TITLES: Final = {
    "syscall": "kernel entry",
    "line": "line of code",
    "bpf": "function of a BPF program",
    CALLERS: "callers of",
    CALLEES: "callees of",
}
_PLACES: Final = {
    "function": "module", CALLERS: "module", CALLEES: "module", "thread": "process",
    "bpf": "program",
}  # fmt: skip
_WITHOUT_KERNEL: Final = frozenset({CALLERS, CALLEES, "syscall"})
_PLACE_FROM: Final = 64
"""Minimum terminal width, in columns, at which tables show ``Key.place``."""
_NOTEWORTHY: Final = 0.05
_PATH_FROM: Final = 10
_FOOT_FROM: Final = 5
_MILLIS: Final = 1e6

_HINTS: Final[Sequence[tuple[str, str, int]]] = (
    ("fptscmlbv", "view", 2),
    ("S/T", "sort", 3),
    ("/", "filter", 4),
    ("space", "freeze", 5),
    ("Enter", "callers", 6),
    ("Esc", "back", 7),
    ("h", "help", 8),
    ("q", "quit", 9),
)
"""Keys, their hints in the bottom line, and the hints' priorities."""
_HELP: Final = (
    ("f", "functions"), ("p", "processes"), ("t", "threads"), ("s", "system calls"),
    ("c", "containers"), ("m", "modules"), ("l", "lines"), ("b", "BPF"),
    ("w", "causes"), ("k", "locks"),
    ("S/T", "sort"), ("/", "filter"), ("space", "freeze"),
    ("Enter", "open"), ("Esc", "back"), ("q", "quit"), ("↑↓", "select"), ("v", "services"),
)  # fmt: skip
_LONG_HELP: Final = """\
f functions    p processes   t threads   s system calls, interrupts, faults
c containers   m modules     l lines     b BPF programs   v services
w what waits are for         k types of kernel locks   Left, Right  next grouping

S, T       sort by self or by total
/          filter rows by a string; Enter keeps the filter, Esc removes it
space      freeze or resume the screen; sampling never stops
Up, Down   select a row; also Page Up, Page Down, Home, End
Enter      callers and callees of a function; functions of any other row
Esc        back
q, Ctrl-C  quit

self       share of samples taken in the function itself
total      share of samples with the function anywhere in the stack
kernel     share of the time spent in the kernel
ms/s, /s   milliseconds of CPU or wait time, or events, per second, for the sort column
lost       samples taken but not shown, by cause
own        CPU time of this program; 100 % is one CPU

Any key closes this page."""


@dataclass(slots=True)
class Status:
    """Fields in the header line that are not derived from samples.

    Attributes:
        host: name of the host, or address of the database table.
        kernel: release of the host's kernel; empty if samples come from a database table.
        rate: the sampling rate, or the name of the sampled events.
        own_share: CPU usage of this process, as a fraction of one CPU; None before the first
            measurement.
        has_ended: whether all targets have exited, so that no more samples will arrive.
        is_stale: whether the last attempt to read new samples from the database failed.
        remarks: sentences that describe which data is missing from samples, and why.
    """

    host: str
    kernel: str
    rate: str
    own_share: float | None = None
    has_ended: bool = False
    is_stale: bool = False
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a terminal, in characters; ``rows`` is the maximum number of table rows."""

    width: int
    height: int
    rows: int | None = None


def page(state: TopState, shown: Shown, status: Status, size: Size, *, color: bool) -> list[str]:
    """Returns the screen's lines, with escape sequences for styles; updates ``state.page``."""
    head = _head(state, state.frozen or shown, status, size.width, color)
    if state.is_helping:
        lines = [head, *_help(size)][: size.height]
        return [*lines, *[""] * (size.height - len(lines))]
    foot = [_foot(state, size.width)] if size.height >= _FOOT_FROM else []
    path = _path(state, state.frozen or shown, size)
    room = max(0, size.height - 1 - len(foot) - len(path))
    body = list(_body(state, shown, size, room))[:room]
    body += [""] * (room - len(body))
    return [head, *path, *body, *foot][: size.height]


def plain_table(state: TopState, shown: Shown, status: Status, rows: int | None) -> list[str]:
    """Returns the header line and the table without escape sequences, for files and pipes."""
    (section,) = state.sections(shown)
    head = "  ".join(text for text, _, _ in _head_parts(shown, status) if text)
    return [head, *_table(section, section.groups[:rows], shown, state.order, None)]


def _head_parts(shown: Shown, status: Status) -> Iterator[tuple[str, str, int]]:
    """Yields the parts of the header line, each with a long form, a short form and a priority."""
    yield escape_controls(status.host), escape_controls(status.host), 2
    yield escape_controls(status.kernel), "", 1
    yield status.rate, status.rate, 3
    yield f"{shown.seconds:.1f} s", f"{shown.seconds:.0f} s", 5
    speed = f"{shown.samples / (shown.seconds or 1):,.0f}/s"
    yield f"{shown.samples / (shown.seconds or 1):,.0f} samples/s", speed, 4
    lost = sum(shown.lost.values())
    yield f"lost {_losses(shown.lost)}", f"lost {lost:,}", 8 if lost else 6
    share = "-" if status.own_share is None else f"{status.own_share:.1%}"
    yield f"own {share}", f"own {share}", 7
    for remark in status.remarks:
        yield remark, "", 0


def _losses(lost: Losses) -> str:
    causes = [f"{count:,} {cause.value}" for cause, count in lost.items() if count]
    return ", ".join(causes) or "0"


def _head(state: TopState, shown: Shown, status: Status, width: int, color: bool) -> str:
    mark = "ENDED" if status.has_ended else "FROZEN" if state.frozen else ""
    mark = mark or ("STALE" if status.is_stale else "")
    parts = list(_head_parts(shown, status))
    room = width - (len(mark) + 2 if mark else 0)
    texts = [long for long, _, _ in parts]
    if _length(texts) > room:
        texts = [short for _, short, _ in parts]
    for at in sorted(range(len(parts)), key=lambda at: parts[at][2]):
        if _length(texts) <= room:
            break
        texts[at] = ""
    has_lost = any(shown.lost.values())
    styled = [
        click.style(text, bold=True, fg="red" if color and has_lost else None)
        if text.startswith("lost") and has_lost
        else click.style(text, bold=True)
        for text in texts
        if text
    ]
    if mark:
        styled.insert(0, click.style(mark, reverse=True, fg="yellow" if color else None))
    return "  ".join(styled) if mark or _length(texts) <= width else cut(texts[-1], width)


def _length(texts: Iterable[str]) -> int:
    kept = [text for text in texts if text]
    return sum(map(len, kept)) + 2 * (len(kept) - 1)


def _path(state: TopState, shown: Shown, size: Size) -> list[str]:
    """Returns the drill-down path; empty at the top level, or if the terminal has too few rows."""
    view = state.level.view
    if size.height < _PATH_FROM or not (view.scope or view.function):
        return []
    steps = [f"{by} {key.name}" for by, key in view.scope]
    steps += [view.function.name] if view.function else []
    if view.function:
        view = view._replace(by=CALLERS)
    share = f": {shown.scope_weight(view) / (shown.weight or 1):.1%} of all"
    text = escape_controls(" > ".join(steps))
    return [click.style(cut(text, max(1, size.width - len(share))) + share, bold=True)]


def _body(state: TopState, shown: Shown, size: Size, room: int) -> Iterator[str]:
    sections = state.sections(shown)
    selected = state.selected_row(sections)
    room = max(0, room - len(sections))
    if size.rows is not None:
        room = min(room, size.rows)
    state.page = max(1, room)
    seen = state.frozen or shown
    first = 0
    for at, section in enumerate(sections):
        others = sections[at + 1 :]
        count = room
        if others:  # half of the rows, or more if the next table needs less than half
            count = max(room // 2, room - len(others[0].groups))
        row = selected - first if selected is not None else None
        start = max(0, min(row or 0, len(section.groups) - 1) - count + 1)
        groups = section.groups[start : start + count] if count else []
        room -= len(groups)
        head, *rows = _table(section, groups, seen, state.order, size.width)
        yield click.style(f"{head:<{size.width}}"[: size.width], reverse=True)
        for number, (text, group) in enumerate(zip(rows, groups, strict=True), start):
            yield _row(text[: size.width], group, section, number == row, size.width)
        if not section.groups:
            room -= 1
            yield _nothing(state, shown)[: size.width]
        first += len(section.groups)


def _nothing(state: TopState, shown: Shown) -> str:
    if state.level.text:
        return "no row matches"
    if state.level.view.by == "bpf":
        return "no BPF program ran"
    return "nothing ran" if (state.frozen or shown).seconds else "no samples yet"


def _row(text: str, group: Group, section: Section, is_selected: bool, width: int) -> str:
    if is_selected:
        return click.style(f"{text:<{width}}", reverse=True)
    if group.total >= _NOTEWORTHY * (section.whole or 1):
        return click.style(text, bold=True)
    return text


def _table(
    section: Section, groups: Sequence[Group], shown: Shown, order: str, width: int | None
) -> list[str]:
    by, whole = section.view.by, section.whole or 1
    is_total = order == "total" and by in FRAMES
    weights = [group.total if is_total else group.own for group in groups]
    whole_units = (_MILLIS if shown.is_time else 1) * (shown.seconds or 1)
    rates = [f"{weight / whole_units:7,.1f}" for weight in weights]
    if by in FRAMES or by == "bpf":
        columns = [
            _share("self", [group.own / whole for group in groups], 9, not is_total),
            _share("total", [group.total / whole for group in groups], 8, is_total),
        ]
    else:
        columns = [_share("share", [group.own / whole for group in groups], 9, False)]
        if by not in _WITHOUT_KERNEL:
            shares = [f"{group.kernel / (group.own or 1):6.0%}" for group in groups]
            columns.append(Column("kernel", shares, 5))
    columns.append(Column("   ms/s" if shown.is_time else "     /s", rates, 6))
    if by in _PLACES and (width is None or width >= _PLACE_FROM):
        columns.append(_place(_PLACES[by], [group.key.place for group in groups], width))
    names = [escape_controls(group.key.name) for group in groups]
    return layout([*columns, Column(_title(section.view), names, 10, is_text=True)], width)


def _share(title: str, shares: Iterable[float], keep: int, is_sorted: bool) -> Column:
    if is_sorted:  # keep the sort column on narrow terminals
        title, keep = f"[{title}]", keep + 2
    return Column(f"{title:>7}", [f"{share:7.1%}" for share in shares], keep)


def _place(title: str, places: Iterable[str], width: int | None) -> Column:
    texts = [escape_controls(place if width is None else basename(place)) for place in places]
    if width is not None:
        room = max(12, width // 5)
        texts = [f"{cut(text, room):<{room}}" for text in texts]
        title = f"{title:<{room}}"
    return Column(title, texts, 4, is_text=True)


def _title(view: View) -> str:
    title = _TITLES.get(view.by, view.by)
    return f"{title} {escape_controls(view.function.name)}" if view.function else title


def _foot(state: TopState, width: int) -> str:
    level = state.level
    text = escape_controls(level.text)
    if state.is_typing:
        return f"/{text[-max(1, width - 2) :]}" + click.style(" ", reverse=True)
    is_drilled = bool(level.view.scope or level.view.function or text)
    search = f"/{cut(text, max(4, width // 3))}" if text else ""
    hints = [hint for hint in _HINTS if hint[0] != "Esc" or is_drilled]
    if level.view.by != "function":
        hints = [(key, "open" if key == "Enter" else what, n) for key, what, n in hints]
    kept: list[tuple[str, str, int]] = []
    for hint in sorted(hints, key=lambda hint: -hint[2]):
        wanted = [search, *(f"{key} {what}" for key, what, _ in [*kept, hint])]
        if _length(wanted) <= width:
            kept.append(hint)
    shown = [f"{click.style(hint[0], bold=True)} {hint[1]}" for hint in hints if hint in kept]
    return "  ".join([*([click.style(search, reverse=True)] if search else []), *shown])


def _help(size: Size) -> list[str]:
    lines = _LONG_HELP.splitlines()
    if len(lines) <= size.height - 1 and max(map(len, lines)) <= size.width:
        return lines
    flowed = [""]
    for key, what in _HELP:
        item = f"{key} {what}"
        if flowed[-1] and len(flowed[-1]) + 2 + len(item) > size.width:
            flowed.append("")
        flowed[-1] += f"  {item}" if flowed[-1] else item
    return [line[: size.width] for line in flowed]
