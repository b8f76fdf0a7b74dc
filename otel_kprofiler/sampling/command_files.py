"""Finds the program, script interpreters and libraries that a command maps at startup."""

import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Final

from otel_kprofiler.elf import ElfError, FileSource, read_dynamic_linker
from otel_kprofiler.errors import describe_error

_LINE_BYTES: Final = 256  # the kernel's BINPRM_BUF_SIZE
_MOST_INTERPRETERS: Final = 4  # limit on nested script interpreters, as in the kernel
_PATH: Final = re.compile(r"^\t(?:\S+ => )?(/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_MAX_LIST_S: Final = 1.0

_log = logging.getLogger(__name__)


def find_command_files(program: str) -> tuple[str, ...]:
    """Returns the paths of a program, its script interpreters and its libraries.

    ``ld.so --list`` lists the libraries without running the program, and applies RPATH,
    LD_LIBRARY_PATH and LD_PRELOAD. Files that cannot be determined in advance are omitted.
    """
    paths: list[str] = []
    try:
        paths.extend(_find_programs(program))  # extend() keeps the paths yielded before an error
        paths += _list_libraries(paths[-1])
    except (OSError, ValueError, ElfError, subprocess.SubprocessError) as error:
        _log.debug("cannot predict all files that %s will map: %s", program,
                   describe_error(error))  # fmt: skip
    return tuple(paths)


def _find_programs(program: str) -> Iterator[str]:
    """Yields the program's path and, if it is a script, its chain of interpreters (execve(2))."""
    for _ in range(_MOST_INTERPRETERS):
        with open(program, "rb") as file:
            line = file.read(_LINE_BYTES).partition(b"\n")[0]
        yield program
        if not line.startswith(b"#!"):
            return
        words = [*shlex.split(os.fsdecode(line[2:])), ""]
        if os.path.basename(words[0]) == "env":
            words = [shutil.which(word) or "" for word in words[1:] if not word.startswith("-")]
        program = words[0]


def _list_libraries(program: str) -> list[str]:
    linker = _read_linker(program)
    if not linker:
        return []
    listed = subprocess.run(
        [linker, "--list", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_MAX_LIST_S,
        check=True,
    )
    return _PATH.findall(os.fsdecode(listed.stdout))


def _read_linker(program: str) -> str:
    """Returns the path of an ELF file's dynamic linker; empty if the file is static."""
    with open(program, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return os.fsdecode(read_dynamic_linker(FileSource(file.fileno(), size)))
