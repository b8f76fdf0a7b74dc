"""Parses key presses from the bytes that a terminal sends."""

import codecs
import re
from typing import Final

UP: Final = "up"
DOWN: Final = "down"
LEFT: Final = "left"
RIGHT: Final = "right"
HOME: Final = "home"
END: Final = "end"
PAGE_UP: Final = "page up"
PAGE_DOWN: Final = "page down"
ENTER: Final = "enter"
ESCAPE: Final = "escape"
BACKSPACE: Final = "backspace"
REDRAW: Final = "redraw"
"""Name of the key Ctrl-L, which redraws the screen."""

_CONTROLS: Final = {
    "\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\b": BACKSPACE, "\x0c": REDRAW
}  # fmt: skip
_FINALS: Final = {"A": UP, "B": DOWN, "C": RIGHT, "D": LEFT, "H": HOME, "F": END}
_NUMBERS: Final = {"1": HOME, "7": HOME, "4": END, "8": END, "5": PAGE_UP, "6": PAGE_DOWN}
_SEQUENCE: Final = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|O([ -~]))")
_BEGUN: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|O)?")
_LONGEST: Final = 32


class KeyParser:
    """Parses keys in terminal input, which may be split at any byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    @property
    def is_waiting(self) -> bool:
        """Returns whether the input so far is the Escape key or the start of an escape sequence."""
        return bool(self._text)

    def feed(self, data: bytes) -> list[str]:
        """Add input, and return the complete keys: characters, or names such as :data:`REDRAW`."""
        self._text += self._decoder.decode(data)
        keys = []
        while self._text:
            if match := _SEQUENCE.match(self._text):
                self._text = self._text[match.end() :]
                number, final, function = match.groups()
                name = _NUMBERS.get(number) if final == "~" else _FINALS.get(final or function)
                keys += [name] if name else []
            elif _BEGUN.fullmatch(self._text) and len(self._text) < _LONGEST:
                break
            else:
                keys += self._take()
        return keys

    def flush(self) -> list[str]:
        """Returns the keys in the pending input; call only when no more input is expected."""
        keys = []
        while self._text:
            keys += self._take()
        return keys

    def _take(self) -> list[str]:
        char, self._text = self._text[0], self._text[1:]
        if char == "\x1b":
            return [ESCAPE]
        if char in _CONTROLS:
            return [_CONTROLS[char]]
        return [char] if char.isprintable() else []
