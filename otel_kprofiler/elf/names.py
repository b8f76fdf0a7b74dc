"""Recognizes mapping symbols and symbol versions among the names in symbol tables."""

import re
from typing import Final

MAPPING_SYMBOL: Final = rb"(?:__pi_)?\$[adtx](?:\.[^\0]*)?"
"""Pattern of the mapping symbols for code (``$x``; ``$a``, ``$t`` on 32 bits) and data (``$d``),
possibly with a suffix (AAELF64, "Mapping symbols"). In kernel code that runs before relocation,
mapping symbols have the prefix ``__pi_`` (arch/arm64/kernel/pi/Makefile).
"""

_VERSION: Final = re.compile(rb'@(?<![\0"@]@)(?=@?[A-Za-z_][\w.+-]*(?:\0|\Z))')
_MAPPING: Final = re.compile(MAPPING_SYMBOL)


def is_mapping_symbol(name: bytes) -> bool:
    """Returns whether a name is a mapping symbol rather than a function."""
    return b"$" in name and _MAPPING.fullmatch(name) is not None


def marks_data(name: bytes) -> bool:
    """Returns whether a mapping symbol marks data."""
    return name[name.index(b"$") + 1] == ord("d")


def cut_versions(names: bytes) -> bytes:
    r"""Strips the version from each name in a string table, by replacing the ``@`` with a NUL.

    Linkers write ``NAME@VERSION`` and ``NAME@@VERSION`` into ``.symtab`` (ld, "VERSION Command"). A
    version is an identifier at the end of the name. In ``@"a b"`` (Zig), ``turn@8`` (PE) and
    ``@name``, the ``@`` is part of the name.
    """
    return _VERSION.sub(b"\0", names) if b"@" in names else names
