"""Demangles Rust names: the legacy form (``_ZN…17h<hash>E``) and v0 (``_R…``).

Grammar of v0: https://rust-lang.github.io/rfcs/2603-rust-symbol-name-mangling-v0.html, with the
constants added later (https://doc.rust-lang.org/rustc/symbol-mangling/v0.html). As in
rustc-demangle's alternate form, crate hashes and the types of integer constants are omitted.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from otel_kprofiler.symbols.user.rust_legacy import LEGACY, demangle_legacy, find_char

_V0: Final = re.compile(r"_?_R([A-Z][0-9A-Za-z_]*)(?:\..*)?", re.DOTALL)

_LENGTH: Final = re.compile("0|[1-9][0-9]{0,5}")
_NUMBER: Final = re.compile("[0-9A-Za-z]{0,11}_")  # at most 64 bits
_HEX: Final = re.compile("[0-9a-f]*_")

_MAX_DEPTH: Final = 100
_MAX_STEPS: Final = 20_000
"""Maximum number of elements in a name. An element counts each time it is referenced."""
MAX_CHARS: Final = 1 << 14
"""Maximum number of characters in a demangled name."""
_BASE_62: Final = {
    digit: value
    for value, digit in enumerate("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
}
_BASIC: Final = {
    "a": "i8", "b": "bool", "c": "char", "d": "f64", "e": "str", "f": "f32", "h": "u8",
    "i": "isize", "j": "usize", "l": "i32", "m": "u32", "n": "i128", "o": "u128", "p": "_",
    "s": "i16", "t": "u16", "u": "()", "v": "...", "x": "i64", "y": "u64", "z": "!",
}  # fmt: skip
_CONTROLS: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": "\\0", "\\": "\\\\"}


def demangle_rust(name: str) -> str | None:
    """Returns the demangled Rust name; None if ``name`` is malformed, too complex or not mangled.

    Time and memory are bounded for any name. Thread-safe; never raises.
    """
    if match := LEGACY.fullmatch(name):
        return demangle_legacy(match[1])
    if match := _V0.fullmatch(name):
        with suppress(_MalformedError, RecursionError):
            return _Printer(match[1]).run()
    return None


class _MalformedError(Exception):
    """Raised if the name does not conform to the grammar, or its demangled form is too long."""


class _Printer:
    """Parses and prints a name in one pass. Back-referenced parts are parsed again."""

    def __init__(self, body: str) -> None:
        self._body = body
        self._at = 0
        self._steps = self._depth = self._chars = 0
        self._bound_lifetimes = 0
        self._out: list[str] = []

    def run(self) -> str:
        self._path(in_value=True)
        text = "".join(self._out)
        if self._at < len(self._body):  # the instantiating crate
            self._path(in_value=False)
        if self._at < len(self._body):
            raise _MalformedError
        return text

    def _print(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > MAX_CHARS:
            raise _MalformedError
        self._out.append(text)

    def _next(self) -> str:
        if self._at >= len(self._body):
            raise _MalformedError
        self._at += 1
        return self._body[self._at - 1]

    def _eat(self, char: str) -> bool:
        if self._body.startswith(char, self._at):
            self._at += 1
            return True
        return False

    def _enter(self) -> None:
        """The caller decrements ``_depth`` when leaving the element."""
        self._steps += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            raise _MalformedError

    def _list(self, read: Callable[[], None], separator: str = ", ") -> int:
        count = 0
        while not self._eat("E"):
            if count:
                self._print(separator)
            read()
            count += 1
        return count

    def _backref(self, read: Callable[[], None]) -> None:
        start = self._at - 1
        target = self._number()
        if target >= start:
            raise _MalformedError
        back, self._at = self._at, target
        self._enter()
        read()
        self._depth -= 1
        self._at = back

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._body, self._at)
        if match is None:
            raise _MalformedError
        self._at = match.end()
        return match[0]

    def _number(self) -> int:
        """Reads a number: ``_`` is 0, ``0_`` is 1, and so on in base 62."""
        digits = self._take(_NUMBER)[:-1]
        if not digits:
            return 0
        value = 0
        for digit in digits:
            value = value * 62 + _BASE_62[digit]
        return value + 1

    def _optional_number(self, tag: str) -> int:
        return self._number() + 1 if self._eat(tag) else 0

    def _identifier(self) -> str:
        is_punycode = self._eat("u")
        length = int(self._take(_LENGTH))
        self._eat("_")
        text = self._body[self._at : self._at + length]
        if len(text) < length:
            raise _MalformedError
        self._at += len(text)
        return _decode_punycode(text) if is_punycode else text

    def _path(self, *, in_value: bool) -> None:
        self._enter()
        tag = self._next()
        if tag == "C":
            self._optional_number("s")
            self._print(self._identifier())
        elif tag == "N":
            self._nested_path(in_value=in_value)
        elif tag in "MXY":
            self._qualified_path(tag)
        elif tag == "I":
            self._path(in_value=in_value)
            self._print("::<" if in_value else "<")
            self._list(self._generic_argument)
            self._print(">")
        elif tag == "B":
            self._backref(lambda: self._path(in_value=in_value))
        else:
            raise _MalformedError
        self._depth -= 1

    def _nested_path(self, *, in_value: bool) -> None:
        namespace = self._next()
        self._path(in_value=in_value)
        number = self._optional_number("s")
        name = self._identifier()
        if namespace.isupper():
            kind = {"C": "closure", "S": "shim"}.get(namespace, namespace)
            self._print(f"::{{{kind}{name and ':'}{name}#{number}}}")
        elif namespace.islower():
            self._print(name and f"::{name}")
        else:
            raise _MalformedError

    def _qualified_path(self, tag: str) -> None:
        if tag != "Y":  # the path of the impl is not printed
            self._optional_number("s")
            out, self._out = self._out, []
            self._path(in_value=False)
            self._out = out
        self._print("<")
        self._type()
        if tag != "M":
            self._print(" as ")
            self._path(in_value=False)
        self._print(">")

    def _generic_argument(self) -> None:
        if self._eat("L"):
            self._lifetime(self._number())
        elif self._eat("K"):
            self._constant(in_value=False)
        else:
            self._type()

    def _lifetime(self, index: int) -> None:
        """Index 0 is the erased lifetime, and 1 the innermost bound lifetime."""
        if not index:
            self._print("'_")
            return
        depth = self._bound_lifetimes - index
        if depth < 0:
            raise _MalformedError
        self._print(f"'{chr(97 + depth)}" if depth < 26 else f"'_{depth}")

    def _binder(self, read: Callable[[], object]) -> None:
        bound = self._optional_number("G")
        if bound > _MAX_DEPTH:
            raise _MalformedError
        outer_lifetimes = self._bound_lifetimes
        if bound:
            self._print("for<")
            for index in range(bound):
                self._print(", " if index else "")
                self._bound_lifetimes += 1
                self._lifetime(1)
            self._print("> ")
        read()
        self._bound_lifetimes = outer_lifetimes

    def _type(self) -> None:
        self._enter()
        tag = self._next()
        if tag in _BASIC:
            self._print(_BASIC[tag])
        elif tag in "RQ":
            self._print("&")
            if self._eat("L") and (index := self._number()):
                self._lifetime(index)
                self._print(" ")
            self._print("mut " if tag == "Q" else "")
            self._type()
        elif tag in "PO":
            self._print("*const " if tag == "P" else "*mut ")
            self._type()
        elif tag in "AS":
            self._print("[")
            self._type()
            if tag == "A":
                self._print("; ")
                self._constant(in_value=True)
            self._print("]")
        elif tag == "T":
            self._tuple(self._type)
        elif tag == "F":
            self._binder(self._function)
        elif tag == "D":
            self._dynamic()
        elif tag == "B":
            self._backref(self._type)
        else:
            self._at -= 1
            self._path(in_value=False)
        self._depth -= 1

    def _tuple(self, read: Callable[[], None]) -> None:
        self._print("(")
        self._print(",)" if self._list(read) == 1 else ")")

    def _function(self) -> None:
        self._print("unsafe " if self._eat("U") else "")
        if self._eat("K"):
            abi = "C" if self._eat("C") else self._identifier().replace("_", "-")
            self._print(f'extern "{abi}" ')
        self._print("fn(")
        self._list(self._type)
        self._print(")")
        if not self._eat("u"):
            self._print(" -> ")
            self._type()

    def _dynamic(self) -> None:
        self._print("dyn ")
        self._binder(lambda: self._list(self._trait, " + "))
        if not self._eat("L"):
            raise _MalformedError
        if index := self._number():
            self._print(" + ")
            self._lifetime(index)

    def _trait(self) -> None:
        is_open = self._open_path()
        while self._eat("p"):
            self._print(", " if is_open else "<")
            is_open = True
            self._print(f"{self._identifier()} = ")
            self._type()
        self._print(">" if is_open else "")

    def _open_path(self) -> bool:
        """Prints a path with generic arguments. Returns whether the argument list is still open."""
        if self._eat("B"):
            opened = []
            self._backref(lambda: opened.append(self._open_path()))
            return opened[0]
        if self._eat("I"):
            self._path(in_value=False)
            self._print("<")
            self._list(self._generic_argument)
            return True
        self._path(in_value=False)
        return False

    def _constant(self, *, in_value: bool) -> None:
        self._enter()
        tag = self._next()
        if tag == "B":
            self._backref(lambda: self._constant(in_value=in_value))
        elif tag == "R" and self._eat("e"):  # &str
            self._print(self._text())
        elif tag in "eRQATV":
            self._print("" if in_value else "{")
            self._structured(tag)
            self._print("" if in_value else "}")
        else:
            self._print(self._scalar(tag))
        self._depth -= 1

    def _structured(self, tag: str) -> None:
        def read() -> None:
            self._constant(in_value=True)

        if tag == "e":
            self._print(f"*{self._text()}")
        elif tag in "RQ":
            self._print("&" if tag == "R" else "&mut ")
            read()
        elif tag == "A":
            self._print("[")
            self._list(read)
            self._print("]")
        elif tag == "T":
            self._tuple(read)
        else:
            self._variant(read)

    def _variant(self, read: Callable[[], None]) -> None:
        self._path(in_value=True)
        kind = self._next()
        if kind == "T":
            self._print("(")
            self._list(read)
            self._print(")")
        elif kind == "S":
            self._print(" { ")
            self._list(lambda: self._field(read))
            self._print(" }")
        elif kind != "U":
            raise _MalformedError

    def _field(self, read: Callable[[], None]) -> None:
        self._optional_number("s")
        self._print(f"{self._identifier()}: ")
        read()

    def _digits(self) -> str:
        return self._take(_HEX)[:-1]

    def _scalar(self, tag: str) -> str:
        if tag == "p":
            return "_"
        if tag not in "hmtyojaslxnibc":
            raise _MalformedError
        sign = "-" if tag in "aslxni" and self._eat("n") else ""
        value = int(self._digits() or "0", 16)
        if tag == "b" and value < 2:
            return ("false", "true")[value]
        if tag == "c" and (char := find_char(value)):
            return "'" + _escape(char, quote="'") + "'"
        if tag in "bc":
            raise _MalformedError
        return f"{sign}{value if value >> 64 == 0 else hex(value)}"

    def _text(self) -> str:
        try:
            text = bytes.fromhex(self._digits()).decode()
        except ValueError as error:
            raise _MalformedError from error
        return '"' + "".join(_escape(char, quote='"') for char in text) + '"'


def _escape(char: str, quote: str) -> str:
    if char == quote:
        return f"\\{char}"
    return _CONTROLS.get(char, char if char.isprintable() else f"\\u{{{ord(char):x}}}")


def _decode_punycode(text: str) -> str:
    """Decodes an identifier with non-ASCII letters (RFC 3492, with ``_`` for ``-``)."""
    base, _, rest = text.rpartition("_")
    try:
        return f"{base}-{rest}".removeprefix("-").encode().decode("punycode")
    except UnicodeError as error:
        raise _MalformedError from error
