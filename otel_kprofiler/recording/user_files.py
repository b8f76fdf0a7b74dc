"""Stores file details in recordings, so that replays can map user-stack addresses to files."""

from collections.abc import Iterable
from typing import Any, Final

from otel_kprofiler.checked import checked_number, checked_text
from otel_kprofiler.model import BuildId, FileDetails, FileId, FileKey, KnownFiles, Segment

NAME: Final = "user_files.json"
"""Archive member with file details. Each row contains the fields of a FileKey and, except for the
last, those of a FileDetails."""


def pack_user_files(files: KnownFiles) -> list[list[object]]:
    """Returns a JSON row for each file."""
    return [[*key, *details[:-1]] for key, details in files.all().items()]


def parse_user_files(rows: Iterable[Any]) -> KnownFiles:
    """Unpacks the rows that :func:`pack_user_files` returned.

    Raises ``TypeError`` or ``ValueError`` if a row is malformed.
    """
    files = KnownFiles()
    for inode, device, generation, path, build_id, file_id, texts, deleted in rows:
        key = FileKey(*map(checked_number, (inode, device, generation)))
        segments = tuple(
            Segment(checked_number(offset), checked_number(size), checked_number(address))
            for offset, size, address in texts
        )
        details = FileDetails(
            checked_text(path),
            None if build_id is None else BuildId(checked_text(build_id)),
            FileId(checked_text(file_id)),
            segments,
            deleted is True,
        )
        files.add(key, details)
    return files
