"""Opens the ``view`` store's SQLite file: location, lock and schema."""

import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from contextlib import suppress
from typing import Final

from otel_kprofiler.errors import KProfilerError, describe_error

_APPLICATION: Final = 0x6B707276  # identifies the file format, for PRAGMA application_id
_VERSION: Final = 2
_BUSY_S: Final = 60.0
_CACHE_KIB: Final = 8192
_WAL_BYTES: Final = 16 << 20
_PREFIX: Final = "otel-kprofiler-view-"
NAME: Final = "samples.db"
_STARTING_S: Final = 60.0


_SCHEMA: Final = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
CREATE TABLE kinds (
    id INTEGER PRIMARY KEY, name TEXT, sample_type TEXT, sample_unit TEXT, period_type TEXT,
    period_unit TEXT, period_ns INTEGER,
    UNIQUE (name, sample_type, sample_unit, period_type, period_unit, period_ns));
CREATE TABLE resources (id INTEGER PRIMARY KEY, digest BLOB UNIQUE);
CREATE TABLE attributes (
    resource INTEGER, name TEXT, value TEXT, PRIMARY KEY (resource, name)) WITHOUT ROWID;
CREATE TABLE threads (
    id INTEGER PRIMARY KEY, resource INTEGER, process TEXT, pid INTEGER, name TEXT, tid INTEGER,
    UNIQUE (resource, tid, name));
CREATE TABLE frames (
    id INTEGER PRIMARY KEY, label TEXT, module TEXT, reason TEXT, color TEXT, inlined INTEGER,
    file TEXT, line INTEGER, UNIQUE (label, module, reason, color, inlined, file, line));
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, parent INTEGER, frame INTEGER, UNIQUE (parent, frame));
CREATE TABLE samples (
    time_ns INTEGER, thread INTEGER, node INTEGER, cpu INTEGER, kind INTEGER, value INTEGER,
    PRIMARY KEY (time_ns, thread, node, cpu, kind)) WITHOUT ROWID;
CREATE TABLE losses (
    end_ns INTEGER, start_ns INTEGER, kind INTEGER, lost INTEGER,
    PRIMARY KEY (end_ns, start_ns, kind)) WITHOUT ROWID;
"""


def open_reader(path: str) -> sqlite3.Connection:
    """Opens a connection that reads a store while other connections write to it."""
    database = _connect(path)
    database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    database.execute("PRAGMA query_only = 1")
    return database


def make_directory() -> str:
    """Creates a private temporary directory, on disk if possible, and returns its path."""
    place = None if "TMPDIR" in os.environ else "/var/tmp"  # noqa: S108 - mkdtemp is safe
    # Remove this user's unlocked directories, which killed processes left behind.
    with suppress(OSError), os.scandir(place or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=place)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return False
        if time.time() - status.st_mtime < _STARTING_S:
            return False
        os.close(lock(os.path.join(entry.path, NAME)))
    except (OSError, KProfilerError):
        return False
    return True


def lock(path: str) -> int:
    """Open or create a file, lock it, and return the descriptor that holds the lock.

    Raises ``KProfilerError`` if the file cannot be opened, or is in use.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KProfilerError(
            f"cannot open {path}: {describe_error(error)}",
            hint="use a file in a directory writable by this user",
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise KProfilerError(
            f"{path} is in use by another `view` process",
            hint="stop that process, or use a different file",
        ) from error
    return fd


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)


def open_writer(path: str, synchronous: str) -> sqlite3.Connection:
    """Opens a connection for writing to a store; creates the store if the file is empty.

    The caller must hold the lock on the file. ``synchronous`` is the value for ``PRAGMA
    synchronous``. Raises ``KProfilerError`` if the file is not a store.
    """
    is_new = not os.path.getsize(path)
    database = _connect(path)
    try:
        names = ("application_id", "user_version")
        versions = tuple(database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        if not is_new and versions != (_APPLICATION, _VERSION):
            raise sqlite3.DatabaseError("not a `view` store, or unsupported format version")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        if is_new:
            database.executescript(_SCHEMA)
    except sqlite3.Error as error:
        database.close()
        raise KProfilerError(
            f"cannot open {path}: {error}", hint="use a file created by `view`, or a new file"
        ) from error
    return database
