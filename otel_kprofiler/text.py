"""Texts for files and terminals: escapes untrusted names, and counts in words.

File names are bytes; Python decodes bytes that are not UTF-8 to lone surrogates, which cannot be
encoded. Names of processes and files may contain terminal escapes, which move the cursor, rename
the window or hide the rest of a line. What people read (terminals, tables, pages, folded stacks)
has no control characters; what programs read (OTLP, pprof, speedscope, JSON) has names as they are,
except for bytes that are not UTF-8.
"""

from __future__ import annotations

_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # bytes of PEP 383


def escape_surrogates(text: str) -> str:
    r"""Escape lone surrogates: ``\xff`` for a byte that is not UTF-8, otherwise ``\ud800``."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(_escape(char) if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def decode_name(name: bytes) -> str:
    r"""Decode a name that may not be UTF-8: such a byte becomes ``\xff``."""
    return escape_surrogates(name.decode("utf-8", "surrogateescape"))


def escape_controls(text: str) -> str:
    r"""Escape unprintable characters, such as ``\x1b``, so that the text is one line.

    Also escapes marks that change the writing direction, and unusual spaces.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if _FIRST_BYTE <= code <= _LAST_BYTE:
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def describe_count(count: int, noun: str, plural: str = "") -> str:
    """``1 sample``, ``2,000 samples``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
