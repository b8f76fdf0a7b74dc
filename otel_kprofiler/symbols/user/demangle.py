"""Demangles C++ and Rust linkage names."""

import ctypes
import functools
import math
import re
from collections.abc import Callable
from typing import Final

from otel_kprofiler.symbols.kernel.names import strip_clone_suffix
from otel_kprofiler.symbols.user.rust_names import MAX_CHARS, demangle_rust

MAX_MANGLED_CHARS: Final = 8_192
"""Longer names are not demangled."""
PLT_SUFFIX: Final = "@plt"
"""Ends the names of stubs that call functions in other files."""
_MAX_CXX_CHARS: Final = 1024
"""Longer C++ names may exceed libiberty's recursion limit (``DEMANGLE_RECURSION_LIMIT``)."""
_MAX_CXX_GROWTH: Final = 20.0
"""Limit on the result of :func:`_growth`. At the limit, demangling takes 0.1 s."""
_RUNTIMES: Final = ("libstdc++.so.6", "libc++abi.so.1")
_REFERENCE: Final = re.compile("[ST][0-9A-Z]*_")

_Demangler = Callable[[bytes], str]


def demangle(name: str) -> str:
    """Returns the name as written in the source; unmangled names are unchanged.

    Drops hashes, and the suffixes of clones and function parts (``.cold``, ``.isra.0``). Names
    remain mangled if they are malformed, longer than 1,024 characters (C++) or 8,192 (Rust), or
    longer than 16,384 when demangled. Demangling C++ names requires an installed C++ runtime
    library (:func:`has_cxx_runtime`). Takes at most about 0.1 s. Thread-safe; never raises.
    """
    if len(name) > MAX_MANGLED_CHARS or "\0" in name:
        return name
    if name.endswith(PLT_SUFFIX):
        return demangle(name.removesuffix(PLT_SUFFIX)) + PLT_SUFFIX
    plain = strip_clone_suffix(name)
    if not plain.startswith("_"):
        return plain
    demangled = demangle_rust(plain)
    if demangled is None and plain.startswith("_Z"):
        demangled = _demangle_cxx(plain)
    return demangled or plain


def demangle_in_go(name: str) -> str:
    """Demangles a name in a Go program. Go's own names, such as ``main.part``, are not mangled."""
    return demangle(name) if name.startswith("_") else name


def has_cxx_runtime() -> bool:
    """Returns whether C++ names can be demangled, which requires libstdc++ or libc++abi."""
    return _find_runtime() is not None


def _demangle_cxx(name: str) -> str | None:
    if len(name) > _MAX_CXX_CHARS or _growth(name) > _MAX_CXX_GROWTH:
        return None
    runtime = _find_runtime()
    return runtime(name.encode("utf-8", "replace")) if runtime else None


def _growth(name: str) -> float:
    """Returns log2 of an upper bound on how often demangling repeats a part of ``name``.

    Two references to an earlier part can double its copies (three can triple them), and a pack
    expansion (``Dp``, ``sp``) repeats its pattern for each element. A name of 230 characters can
    expand to 27 MB. https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling
    """
    packs = name.count("Dp") + name.count("sp")
    return len(_REFERENCE.findall(name)) * math.log2(3) / 3 + packs * math.log2(len(name))


@functools.cache
def _find_runtime() -> _Demangler | None:
    for library in _RUNTIMES:
        try:
            return _load(library)
        except (OSError, AttributeError):  # the C++ runtime is not installed
            continue
    return None


def _load(library: str) -> _Demangler:
    """Loads ``__cxa_demangle``. Raises ``OSError`` or ``AttributeError`` if it is missing."""
    run = ctypes.CDLL(library)["__cxa_demangle"]
    run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    run.restype = ctypes.c_void_p  # c_char_p would lose the pointer that must be freed
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None

    def call(name: bytes) -> str:
        result = run(name, None, None, None)
        if not result:
            return ""
        try:
            readable = ctypes.string_at(result)
            return readable.decode("utf-8", "replace") if len(readable) <= MAX_CHARS else ""
        finally:
            free(result)

    return call
