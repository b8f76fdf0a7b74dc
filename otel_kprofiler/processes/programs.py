"""Determines which script, module or class an interpreter runs, from its command line.

Other arguments may be secrets, so they are neither kept nor exported.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from otel_kprofiler.host import HostFiles, read_limited
from otel_kprofiler.text import decode_name

_MAX_BYTES: Final = 256 * 1024
"""Maximum number of bytes read from a command line, which suffices for long class paths."""
_NAME: Final = re.compile(rb"[A-Za-z0-9_@+][\w.@+$/-]{0,127}", re.ASCII)
_TITLE: Final = re.compile(rb"([A-Za-z][\w.-]{0,63}): ", re.ASCII)
_MEMFD: Final = "memfd:"
_NO_FILES: Final = (b"/dev/fd/", b"/proc/")
"""Directories containing scripts that have no file name, such as the output of ``<(command)``."""


class _Options(NamedTuple):
    """An interpreter's options.

    Attributes:
        valued: options whose value is the next argument.
        code: options that prevent the interpreter from running a script, such as ``-c``.
        module: options whose value is the program, such as ``-m``.
        letters: like ``valued``, for single-letter options, which may be combined.
        code_letters: like ``code``, for single-letter options, which may be combined.
    """

    valued: frozenset[bytes] = frozenset()
    code: frozenset[bytes] = frozenset()
    module: frozenset[bytes] = frozenset()
    letters: bytes = b""
    code_letters: bytes = b""


_PYTHON: Final = _Options(
    valued=frozenset([b"--check-hash-based-pycs"]), letters=b"WX", code_letters=b"c"
)
_SHELL: Final = _Options(
    valued=frozenset([b"--rcfile", b"--init-file"]), letters=b"oO", code_letters=b"cs"
)
_NODE: Final = _Options(
    valued=frozenset(
        b"-r --require --import --loader --experimental-loader -C --conditions --env-file --title "
        b"--inspect-port --input-type".split()
    ),
    code=frozenset(b"-e --eval -p --print -pe -i --interactive --test --run".split()),
)
_JAVA: Final = _Options(
    valued=frozenset(
        b"-cp -classpath --class-path -p --module-path --upgrade-module-path --add-modules "
        b"--add-opens --add-exports --add-reads --limit-modules --patch-module --source "
        b"--enable-native-access".split()
    ),
    module=frozenset([b"-jar", b"-m", b"--module"]),
)
_INTERPRETERS: Final = (
    (re.compile(r"(python|pypy)[\d.]*t?d?"), _PYTHON),
    (re.compile(r"(ba|da|z|k|mk)?sh"), _SHELL),
    (re.compile(r"node(js)?"), _NODE),
    (re.compile(r"java"), _JAVA),
)


def find_program(executable: str, arguments: Sequence[bytes]) -> str:
    """Returns the program that an interpreter runs; empty for other executables.

    The program is the name of the script (``manage.py``), ``-m`` and the module (``-m
    http.server``), the class, or the archive (``app.jar``). For an executable from memfd_create(2),
    the program is the name in argv[0]. ``arguments`` is the command line, from argv[0] on.
    """
    if executable.startswith(_MEMFD):
        return _base_name(arguments[0]) if arguments else ""
    options = _find_options(executable)
    if options is None:
        return ""
    if arguments and (title := _TITLE.match(arguments[0])):
        return decode_name(title[1])  # set by the program, for example with setproctitle
    rest = list(reversed(arguments[1:]))
    program: str | None = None
    while rest and program is None:
        program = _read_word(rest.pop(), rest, options)
    return program or ""


def _find_options(executable: str) -> _Options | None:
    matching = (options for pattern, options in _INTERPRETERS if pattern.fullmatch(executable))
    return next(matching, None)


def _read_word(word: bytes, rest: list[bytes], options: _Options) -> str | None:
    """Parses an argument and its value. Returns the program; None to try the next argument."""
    if word == b"--":
        word = rest.pop() if rest else b""
    elif word.startswith(b"-") or (options is _SHELL and word.startswith(b"+")):
        return _read_option(word, rest, options)
    elif options is _JAVA and word.startswith(b"@"):
        return None  # a Java @argfile; its contents are not read
    return _find_file(word, options)


def _read_option(word: bytes, rest: list[bytes], options: _Options) -> str | None:
    if word in options.code or word == b"-":
        return ""
    if word in options.module:
        return _base_name(rest.pop()) if rest else ""
    if word in options.valued:
        del rest[-1:]
        return None
    if options.code_letters and not word.startswith(b"--"):
        return _read_letters(word[1:], rest, options)
    return None


def _read_letters(letters: bytes, rest: list[bytes], options: _Options) -> str | None:
    for at, letter in enumerate(letters, 1):
        if letter in options.code_letters:
            return ""
        if options is _PYTHON and letter == ord("m"):
            module = letters[at:] or (rest.pop() if rest else b"")
            return f"-m {decode_name(module)}" if _NAME.fullmatch(module) else ""
        if letter in options.letters:
            if options is _SHELL or at == len(letters):
                del rest[-1:]
            if options is not _SHELL:
                return None
    return None


def _find_file(word: bytes, options: _Options) -> str:
    if options is _PYTHON and word.endswith(b"/__main__.py"):
        word = word.rpartition(b"/")[0]
    return _base_name(word)


def _base_name(word: bytes) -> str:
    """Returns a path's last component, or a class name unchanged; empty for other strings."""
    if word.startswith(_NO_FILES):
        return ""
    name = word.rstrip(b"/").rpartition(b"/")[2]
    return decode_name(name) if _NAME.fullmatch(name) else ""


def read_program(files: HostFiles, pid: int, executable: str) -> str:
    """Returns the program that an interpreter runs (:func:`find_program`); empty if unknown.

    If the executable is an interpreter, the function reads the process's memory, which can block.
    """
    if not executable.startswith(_MEMFD) and _find_options(executable) is None:
        return ""
    try:
        words = read_limited(files, f"/proc/{pid}/cmdline", _MAX_BYTES)
    except OSError:
        return ""
    return find_program(executable, words.split(b"\0")[:-1])
