"""Reads source files named by frames in the displayed profile.

Profiles may come from unknown sources, so the names in them are not trusted. Reads only regular
files that have a programming language's suffix or begin with ``#!``. The user who views the page
must be allowed to read the file. The text contains no control characters except tabs.
"""

import codecs
import ctypes
import io
import os
import platform
import pwd
import re
import stat
import tokenize
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.text import escape_controls

MAX_SOURCE_BYTES: Final = 2 << 20
"""Maximum size of a source file, in bytes. Hand-written files of CPython and Linux are smaller."""
_MAX_LINE: Final = 2000
_SUFFIXES: Final = frozenset({
    "adb", "ads", "asm", "c", "c++", "cc", "cjs", "cpp", "cu", "cuh", "cxx", "d", "def", "f",
    "f90", "for", "go", "h", "hh", "hpp", "hs", "hxx", "i", "ii", "inc", "inl", "ipp", "java",
    "jl", "js", "jsx", "kt", "l", "lua", "m", "mjs", "ml", "mm", "nim", "pas", "php", "pl",
    "pm", "py", "pyi", "pyw", "pyx", "pxd", "pxi", "r", "rb", "rs", "s", "scala", "sx", "swift",
    "tcc", "ts", "tsx", "v", "y", "zig",
})  # fmt: skip
_CXX_HEADER: Final = re.compile(r"/include/(?:.*/)?c\+\+/")  # <vector> has no suffix
_SCRIPT: Final = b"#!"
_LINE_END: Final = re.compile(r"\r\n?|\n")
_QUADRATIC: Final = frozenset({"idna", "punycode"})
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159}
"""System call number of setgroups(2), from Linux's syscall_64.tbl and asm-generic/unistd.h."""


class SourceError(KProfilerError):
    """Raised for a source file that cannot be shown."""


class SourceFile(NamedTuple):
    r"""A source file's lines, separated by ``\n``, and the Unix time of its last modification.

    Long lines are truncated.
    """

    text: str
    modified_ms: int


def read_source(path: str, user: int) -> SourceFile:
    """Reads a source file with a user's credentials.

    ``path`` is absolute, as in a frame. Reading as a different user requires root, and takes place
    in a separate thread, because Linux credentials belong to threads. Raises :class:`SourceError`
    if there is no such source file, or the user cannot read it.
    """
    if user == os.geteuid():
        return _read(path)

    def read() -> SourceFile:
        _become(user)
        return _read(path)

    with ThreadPoolExecutor(1, thread_name_prefix="source file") as threads:
        return threads.submit(read).result()


def _become(user: int) -> None:
    """Give this thread a user's credentials by raw system calls; libc would affect all threads."""
    refused = f"cannot read files as user {user}"
    machine = platform.machine()
    if machine not in _SETGROUPS:
        raise SourceError(f"{refused}: unsupported machine type {machine!r}")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        account = pwd.getpwuid(user)
    except KeyError as error:
        raise SourceError(f"{refused}: there is no such user") from error
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    array = (ctypes.c_uint32 * len(groups))(*groups)
    is_set = libc.syscall(_SETGROUPS[machine], len(groups), array) == 0
    libc.setfsgid(ctypes.c_uint32(account.pw_gid))
    libc.setfsuid(ctypes.c_uint32(user))
    if not is_set or libc.setfsuid(ctypes.c_uint32(-1)) != user:
        raise SourceError(f"{refused}: the kernel refused to switch to that user")


def _read(path: str) -> SourceFile:
    if not path.startswith("/"):
        raise SourceError(f"{path} is a relative path: the profile does not contain its directory")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may have side effects
            raise SourceError(f"{path} is not a regular file")
        descriptor = os.open(path, _FLAGS)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise SourceError(f"{path} is not a regular file")
            data = file.read(MAX_SOURCE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"{path} cannot be read: {reason}") from error
    if len(data) > MAX_SOURCE_BYTES:
        raise SourceError(f"{path} is larger than {MAX_SOURCE_BYTES >> 20} MiB")
    if not _is_source(path, data):
        raise SourceError(f"{path} is not shown: its name does not look like a source file's")
    lines = [_printable(line[:_MAX_LINE]) + "…" * (len(line) > _MAX_LINE)
             for line in _LINE_END.split(_decode(path, data))]  # fmt: skip
    return SourceFile("\n".join(lines), facts.st_mtime_ns // 1_000_000)


def _is_source(path: str, data: bytes) -> bool:
    _, dot, suffix = os.path.basename(path).rpartition(".")
    if dot:
        return suffix.lower() in _SUFFIXES
    return data.startswith(_SCRIPT) or _CXX_HEADER.search(path) is not None


def _decode(path: str, data: bytes) -> str:
    """Decodes text by its PEP 263 comment or byte order mark, else as UTF-8, else as Latin-1."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    if b"\0" in data:
        raise SourceError(f"{path} is not a text file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if encoding not in _QUADRATIC:
            return data.decode(encoding)
    except (SyntaxError, LookupError, UnicodeError):
        pass  # an unknown encoding, or bytes that are invalid in that encoding
    return data.decode("latin-1")


def _printable(line: str) -> str:
    return "\t".join(map(escape_controls, line.split("\t")))
