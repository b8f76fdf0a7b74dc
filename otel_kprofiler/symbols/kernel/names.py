"""What kernel symbol names mean: compiler suffixes, boundary markers, choice among aliases."""

from __future__ import annotations

import re
from typing import Final

from otel_kprofiler.model import Line

PAD_PREFIX: Final = b"__pfx_"
"""Names the padding in front of a function (``objtool --prefix``, kernel 6.2 and later)."""
GENERIC_NAMES: Final = frozenset({b"init_module", b"cleanup_module"})
"""Names that every module gives to its entry points; they say nothing."""

# All symbols with which the linker scripts of 5.10 to 6.18 (x86, arm64) bound code.
_MARKER = re.compile(
    rb"(?:__pi_|__efistub_|__kvm_nvhe_)?(?:"  # prefixes of arch/arm64/kernel/image-vars.h
    rb"_[se]?text|_[se]inittext"  # arch/*/kernel/vmlinux.lds.S
    rb"|__(?:\w+_)?text_(?:start|end)"  # include/asm-generic/vmlinux.lds.h, and arm64
    rb"|__(?:init|exit)text_(?:begin|end)|__init_(?:begin|end)"
    rb"|__indirect_thunk_(?:start|end)"  # x86, 5.10 and 6.1
    rb"|__relocate_(?:new_)?kernel_(?:start|end)"  # arm64 from 6.1, x86 in 6.18
    rb")"
)
_MARKER_ENDINGS = (b"text", b"_start", b"_end", b"_begin")
# Suffixes that gcc and clang append to a clone or a part of a function.
_CLONE_SUFFIX = re.compile(
    r"(?:\.(?:isra|constprop|part|cold|llvm|lto_priv|localalias|__uniq|cfi|cfi_jt)(?:\.\d+)*)+$"
)


def is_marker(name: bytes) -> bool:
    """Whether a name marks a boundary of the linker script and so names no code.

    Examples: ``_text``, ``_etext``, ``__irqentry_text_start``, ``__indirect_thunk_end``.
    """
    return name.endswith(_MARKER_ENDINGS) and _MARKER.fullmatch(name) is not None


def alias_rank(kind: int, name: bytes) -> tuple[int, int, int, bytes]:
    """Sort key among symbols at one address: the smallest is the name that is shown.

    Real functions before boundary markers, particular names before generic ones, then global,
    weak, local; then the shortest, then the first in the alphabet.

    Args:
        kind: ASCII code of the type letter of kallsyms (as of ``nm``).
        name: the symbol's name.
    """
    if is_marker(name):
        return 5, 0, len(name), name
    linkage = {ord("T"): 0, ord("W"): 1, ord("w"): 1, ord("t"): 2}.get(kind, 3)
    return (4 if name in GENERIC_NAMES else 0), linkage, len(name), name


def make_line(name: bytes) -> Line:
    """The line of a symbol: cleaned name for people, the linker's name where it differs."""
    system_name = name.decode("utf-8", "backslashreplace")
    if "." not in system_name:
        return Line(system_name)
    function = _CLONE_SUFFIX.sub("", system_name)
    return Line(function, system_name) if function not in {"", system_name} else Line(system_name)
