"""Escapes untrusted names for files and terminals, formats counts, and truncates long text.

File names are bytes. Python decodes bytes that are not UTF-8 to lone surrogates, which cannot be
encoded. Process and file names may contain terminal escapes. Output for people (terminals, tables,
pages, folded stacks) contains no control characters. Output for programs (OTLP, pprof, speedscope,
JSON) contains names unchanged, except for bytes that are not UTF-8.
"""

_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF  # bytes escaped by PEP 383


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
    r"""Decode a name, escaping bytes that are not valid UTF-8, as in ``\xff``."""
    return escape_surrogates(name.decode("utf-8", "surrogateescape"))


def escape_controls(text: str) -> str:
    r"""Escape unprintable characters, such as ``\x1b``, and newlines.

    Also escapes marks that change the text direction, and unusual spaces.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if _FIRST_BYTE <= code <= _LAST_BYTE:
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def cut(text: str, width: int) -> str:
    """Shortens a string to at most ``width`` columns by removing its middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def describe_count(count: int, noun: str, plural: str = "") -> str:
    """Formats a count with its noun: ``1 sample``, ``2,000 samples``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
