"""Holds the interactive state of ``top``: the view, the sort order and the selection."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from otel_kprofiler.analysis import ITSELF, NO_CALLER, NO_PROGRAM, NO_STACK, Group, Key
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
)
from otel_kprofiler.cli.top_windows import CALLEES, CALLERS, Shown, View

GROUPING_KEYS: Final = {
    "f": "function",
    "p": "process",
    "t": "thread",
    "s": "syscall",
    "c": "container",
    "m": "module",
    "l": "line",
    "b": "bpf",
    "w": "cause",
    "k": "lock",
    "v": "service",
}
"""Groupings by key; the arrow keys cycle through them in this order."""
ORDERS: Final = ("self", "total")
_BYS: Final = tuple(GROUPING_KEYS.values())
_STEPS: Final = {UP: -1, DOWN: 1}
_PAGES: Final = {PAGE_UP: -1, PAGE_DOWN: 1}
_MAX_FILTER: Final = 200
_NO_FUNCTIONS: Final = frozenset({ITSELF, NO_CALLER, NO_STACK})


class Section(NamedTuple):
    """A table on the screen: its rows, and the total weight (100 %)."""

    view: View
    groups: Sequence[Group]
    whole: int


@dataclass(slots=True)
class Level:
    """A level of the drill-down.

    Attributes:
        view: what the level shows; if ``view.function`` is set, the function's callers and callees.
        selected: section and key of the selected row; None if no row is selected.
        text: the row filter, a string that a row must contain to be shown.
    """

    view: View
    selected: tuple[str, Key] | None = None
    row: int = 0
    text: str = ""


@dataclass(slots=True)
class TopState:
    """The state of the screen, updated by :meth:`press`; :meth:`sections` returns the tables.

    Attributes:
        by: name of the initial grouping.
        order: the weight to sort by, ``self`` or ``total``.
        is_typing: whether keys edit the row filter.
        frozen: contents of a frozen screen; otherwise None.
        page: number of rows that fitted on the screen when it was last drawn.
    """

    by: str = "function"
    order: str = "self"
    is_typing: bool = False
    is_helping: bool = False
    frozen: Shown | None = None
    has_quit: bool = False
    page: int = 10
    _levels: list[Level] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._levels.append(Level(View(self.by)))

    @property
    def level(self) -> Level:
        """Returns the innermost level of the drill-down."""
        return self._levels[-1]

    def press(self, key: str, shown: Shown) -> None:
        """Change the state as requested by ``key``, a character or a name in :mod:`.keys`."""
        shown = self.frozen or shown
        if self.is_typing:
            self._type(key)
        elif self.is_helping:
            self.is_helping = False
        elif key == "q":
            self.has_quit = True
        elif key in ("h", "?"):
            self.is_helping = True
        elif key == " ":
            self.frozen = None if self.frozen else shown
        elif key == "/":
            self.is_typing = True
        elif key in ("S", "T"):
            self.order = ORDERS[key == "T"]
        elif key in GROUPING_KEYS:
            self._group_by(GROUPING_KEYS[key])
        elif key in (LEFT, RIGHT):
            self._turn(1 if key == RIGHT else -1)
        elif key == ENTER:
            self._enter(shown)
        elif key in (ESCAPE, BACKSPACE):
            self._go_back()
        else:
            self._move(key, shown)

    def sections(self, shown: Shown) -> list[Section]:
        """Returns the tables that show the current samples, or those on the frozen screen."""
        shown = self.frozen or shown
        view = self.level.view
        if view.function is None:
            return [self._section(shown, view)]
        return [self._section(shown, view._replace(by=by)) for by in (CALLERS, CALLEES)]

    def selected_row(self, sections: Sequence[Section]) -> int | None:
        """Returns the index of the selected row among all rows; None if no row is selected.

        If the selected row was removed, selects the row at the same index, or else the last row.
        """
        level, rows = self.level, _rows(sections)
        if level.selected is None or not rows:
            return None
        if level.selected in rows:
            level.row = rows.index(level.selected)
        else:
            level.row = min(level.row, len(rows) - 1)
            level.selected = rows[level.row]
        return level.row

    def _section(self, shown: Shown, view: View) -> Section:
        wanted = self.level.text.casefold()
        groups = [
            group
            for group in shown.groups(view)
            if group.key != NO_PROGRAM
            and (wanted in group.key.name.casefold() or wanted in group.key.place.casefold())
        ]
        if self.order == "total":
            groups.sort(key=lambda group: (-group.total, -group.own, group.key))
        else:
            groups.sort(key=lambda group: (-group.own, -group.total, group.key))
        return Section(view, groups, shown.scope_weight(view))

    def _type(self, key: str) -> None:
        level = self.level
        if key == ENTER:
            self.is_typing = False
        elif key == ESCAPE:
            self.is_typing, level.text = False, ""
        elif key == BACKSPACE:
            level.text = level.text[:-1]
        elif len(key) == 1:
            level.text = (level.text + key)[:_MAX_FILTER]

    def _group_by(self, by: str) -> None:
        """If a function's callers are shown, drill down into the function."""
        view = self.level.view
        if view.function is not None:
            scope = (*view.scope, ("function", view.function))
            self._levels.append(Level(View(by, scope)))
        elif view.by != by:
            self._levels[-1] = Level(view._replace(by=by))

    def _turn(self, step: int) -> None:
        view = self.level.view
        if view.function is None:
            self._group_by(_BYS[(_BYS.index(view.by) + step) % len(_BYS)])

    def _enter(self, shown: Shown) -> None:
        """Open the selected function's callers and callees, or the selected group's functions."""
        sections = self.sections(shown)
        rows = _rows(sections)
        if not rows:
            return
        row = self.selected_row(sections)
        name, key = rows[row or 0]
        self.level.selected = name, key
        view = self.level.view
        if view.by == "function" and key not in _NO_FUNCTIONS:
            self._levels.append(Level(View("function", view.scope, key)))
        elif view.by != "function":
            self._levels.append(Level(View("function", (*view.scope, (view.by, key)))))

    def _go_back(self) -> None:
        if len(self._levels) > 1:
            self._levels.pop()
        else:
            self.level.text, self.level.selected = "", None

    def _move(self, key: str, shown: Shown) -> None:
        sections = self.sections(shown)
        rows, row = _rows(sections), self.selected_row(sections)
        if not rows:
            return
        if key in _STEPS:
            wanted = 0 if row is None else row + _STEPS[key]
        elif key in _PAGES:
            wanted = (row or 0) + _PAGES[key] * max(1, self.page)
        elif key in (HOME, END):
            wanted = 0 if key == HOME else len(rows)
        else:
            return
        self.level.row = max(0, min(wanted, len(rows) - 1))
        self.level.selected = rows[self.level.row]


def _rows(sections: Sequence[Section]) -> list[tuple[str, Key]]:
    return [(section.view.by, group.key) for section in sections for group in section.groups]
