"""Reads a configuration file, without the libraries that parse it."""

import os
import stat
from typing import Final

from otel_kprofiler.errors import ConfigError, ConfigProblem

MAX_BYTES: Final = 256 * 1024
"""Maximum size of a configuration file, in bytes. The example file with every key is 20 KiB."""

_FILE_FIX: Final = "pass the agent's configuration file; docs/configuration.md has an example"
_MODE_FIX: Final = "give the agent's user read access, for example with chgrp and chmod g+r"


def read_text(path: str, *, may_wait: bool = True) -> str:
    """Read a UTF-8 file. Raises ``ConfigError`` if the file is unreadable or too large.

    If ``may_wait`` is false, a FIFO or device, which could block forever, is rejected unread.
    """
    hint = ""
    try:
        content = _read(path, 0 if may_wait else os.O_NONBLOCK)
        if len(content) <= MAX_BYTES:
            return content.decode()
        message = f"is larger than {MAX_BYTES >> 10} KiB"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        hint = _MODE_FIX if isinstance(error, PermissionError) else _FILE_FIX
    except UnicodeDecodeError:
        message = "is not UTF-8 text"
    raise ConfigError([ConfigProblem(path, 0, 0, "", message)], hint=hint)


def _read(path: str, flags: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags), "rb") as file:
        if flags and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a regular file")
        return file.read(MAX_BYTES + 1)
