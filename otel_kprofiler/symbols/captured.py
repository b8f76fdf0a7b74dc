"""Files of a host that were captured before: single files, folders and tar archives."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from otel_kprofiler.errors import KProfilerError

MAX_BYTES: Final = 1 << 30
"""Of a file, or of all files of an archive, unpacked."""

_OPEN: Final[Mapping[str, Callable[..., Any]]] = {".xz": lzma.open, ".gz": gzip.open}


class CapturedFiles:
    """Serves host paths from captured files; satisfies ``HostFiles``.

    Args:
        sources: local path by host path. A local ``.tar``, ``.tar.xz`` or ``.tar.gz`` stands for
            a folder that it holds below one top folder, a local folder for a folder, and any
            other file for a file (``.xz`` and ``.gz`` are decompressed).

    Raises:
        OSError: a local file cannot be read.
        KProfilerError: it is damaged, or larger than :data:`MAX_BYTES`.
    """

    def __init__(self, sources: Mapping[str, str | os.PathLike[str]]) -> None:
        self._files: dict[str, bytes] = {}
        self._paths: dict[str, str] = {}
        for host_path, source in sources.items():
            local = os.fspath(source)
            if local.removesuffix(".xz").removesuffix(".gz").endswith(".tar"):
                self._add_archive(host_path, local)
            else:
                self._paths[host_path] = local

    def open_fd(self, path: str) -> int:
        """Open for reading; the caller closes the descriptor."""
        local = self._local(path)
        if local is not None and not local.endswith(tuple(_OPEN)):
            return os.open(local, os.O_RDONLY | os.O_CLOEXEC)
        data = self.read_bytes(path)
        descriptor = os.memfd_create(os.path.basename(path))
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def read_bytes(self, path: str) -> bytes:
        """Whole content of a file."""
        local = self._local(path)
        if local is None:
            if path not in self._files:
                raise FileNotFoundError(2, os.strerror(2), path)
            return self._files[path]
        return _read(local)

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        local = self._local(path)
        if local is not None:
            return sorted(os.listdir(local))
        start = len(path) + 1
        names = {
            name[start:].partition("/")[0] for name in self._files if name.startswith(path + "/")
        }
        if not names:
            raise FileNotFoundError(2, os.strerror(2), path)
        return sorted(names)

    def read_link(self, path: str) -> str:
        """Target of a symbolic link."""
        local = self._local(path)
        if local is None:
            raise FileNotFoundError(2, os.strerror(2), path)
        return os.readlink(local)

    def _local(self, path: str) -> str | None:
        """Local path of a host path that was given itself or by one of its folders."""
        folder, rest = path, ""
        while folder.strip("/"):
            if folder in self._paths:
                return self._paths[folder] + rest
            folder, _, name = folder.rpartition("/")
            rest = f"/{name}{rest}"
        return None

    def _add_archive(self, host_path: str, local: str) -> None:
        import tarfile  # noqa: PLC0415  # 10 ms of start time that only archives need

        room = MAX_BYTES
        try:
            with tarfile.open(fileobj=io.BytesIO(_read(local))) as archive:
                for member in archive:
                    room -= member.size  # of a sparse file, more than the archive holds
                    _check_size(local, MAX_BYTES - room)
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is not None:
                        inner = member.name.removeprefix("./").partition("/")[2]
                        self._files[f"{host_path}/{inner}"] = file.read()
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise KProfilerError(f"{local} is no archive, or a damaged one: {error}") from error


def _read(local: str) -> bytes:
    """Content of a local file, decompressed if its name says so."""
    opener = _OPEN.get(os.path.splitext(local)[1], open)
    try:
        with opener(local, "rb") as file:
            content: bytes = file.read(MAX_BYTES + 1)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise KProfilerError(f"{local} cannot be decompressed: {error}") from error
    _check_size(local, len(content))
    return content


def _check_size(local: str, size: int) -> None:
    if size > MAX_BYTES:
        raise KProfilerError(f"{local} has more than {MAX_BYTES >> 30} GiB when it is unpacked")
