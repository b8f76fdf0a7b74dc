"""Names that others have chosen, made fit for files and terminals.

Names of files are bytes, which Python reads as text with lone surrogates for what is not UTF-8;
no encoder takes those. Whoever names a process or a file can put what moves a cursor, renames a
window or hides the rest of a line into its name.
"""

from __future__ import annotations

_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # bytes of PEP 383


def escape_surrogates(text: str) -> str:
    r"""The text as it can be encoded: ``\xff`` for a byte that is not UTF-8, ``\ud800`` else."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(_escape(char) if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def escape_controls(text: str) -> str:
    r"""The text in one line, with ``\x1b`` and the like for all that cannot be printed.

    Marks that change the direction of writing, and spaces that look like others, are escaped too.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if _FIRST_BYTE <= code <= _LAST_BYTE:
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")
