"""Interprets kernel symbol names: compiler suffixes, boundary markers, and alias ranks."""

import re
from typing import Final

from otel_kprofiler.model import Line

PAD_PREFIX: Final = b"__pfx_"
"""Prefix of the padding before a function (``objtool --prefix``, kernel 6.2 and later)."""
END_OF_TEXT: Final = b"_etext"
PREAMBLE: Final = re.compile(rb" __cfi_(?!(?:check(?:_fail)?|slowpath(?:_diag)?)\s)")
"""Matches a space and the prefix of a function's preamble (kCFI, 6.1 and later). Functions in
kernel/cfi.c have the same prefix, but are not preambles.
"""
GENERIC_NAMES: Final = frozenset({b"init_module", b"cleanup_module"})
"""Names of generic entry points, which are the same in every module."""

# Symbols that mark code boundaries in the linker scripts of kernels 5.10 to 6.18 (x86, arm64).
_MARKER = re.compile(
    rb"(?:__pi_|__efistub_|__kvm_nvhe_)?(?:"  # prefixes in arch/arm64/kernel/image-vars.h
    rb"_[se]?text|_[se]inittext"  # arch/*/kernel/vmlinux.lds.S
    rb"|__(?:\w+_)?text_(?:start|end)"  # asm-generic/vmlinux.lds.h and arm64's vmlinux.lds.S
    rb"|__(?:init|exit)text_(?:begin|end)|__init_(?:begin|end)"
    rb"|__indirect_thunk_(?:start|end)"  # x86, Linux 5.10 and 6.1
    rb"|__relocate_(?:new_)?kernel_(?:start|end)"  # arm64 since Linux 6.1, x86 in Linux 6.18
    rb")"
)
_MARKER_ENDINGS = (b"text", b"_start", b"_end", b"_begin")
# Suffixes that gcc and clang append to function names, for example for clones and cold parts.
_CLONE_SUFFIX = re.compile(
    r"(?:\.(?:isra|constprop|part|cold|llvm|lto_priv|localalias|__uniq|cfi|cfi_jt)(?:\.\d+)*)+$"
)


def fold_preamble(name: bytes) -> bytes:
    """Replaces the preamble prefix ``__cfi_`` of a name with the padding prefix ``__pfx_``.

    Names without a preamble prefix are unchanged.
    """
    return PREAMBLE.sub(b" " + PAD_PREFIX, b" %b\n" % name)[1:-1]


def is_marker(name: bytes) -> bool:
    """Returns whether a name is a boundary marker from the linker script, such as ``_etext``."""
    return name.endswith(_MARKER_ENDINGS) and _MARKER.fullmatch(name) is not None


def alias_rank(kind: int, name: bytes) -> tuple[int, int, int, bytes]:
    """Returns a sort key for an address's symbols; the symbol with the smallest key is displayed.

    Functions rank before boundary markers, specific names before generic names, then global before
    weak before local symbols, then shorter names before longer names. ``kind`` is the ASCII code of
    the type letter in kallsyms.
    """
    if is_marker(name):
        return 5, 0, len(name), name
    linkage = {ord("T"): 0, ord("W"): 1, ord("w"): 1, ord("t"): 2}.get(kind, 3)
    return (4 if name in GENERIC_NAMES else 0), linkage, len(name), name


def make_line(name: bytes) -> Line:
    """Returns the name without clone suffixes, and the linkage name if the two differ."""
    system_name = name.decode("utf-8", "backslashreplace")
    function = strip_clone_suffix(system_name)
    return Line(function, system_name) if function != system_name else Line(system_name)


def strip_clone_suffix(name: str) -> str:
    """Strips the suffixes that compilers append to the names of function clones and parts."""
    return (_CLONE_SUFFIX.sub("", name) or name) if "." in name else name
