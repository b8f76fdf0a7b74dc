"""Files of a host that were captured before: single files, folders and tar archives."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Mapping
from typing import Final

_UNPACK: Final = {".xz": lzma.decompress, ".gz": gzip.decompress}


class CapturedFiles:
    """Serves host paths from captured files; satisfies ``HostFiles``.

    Args:
        sources: local path by host path. A local ``.tar``, ``.tar.xz`` or ``.tar.gz`` stands for
            a folder that it holds below one top folder, a local folder for a folder, and any
            other file for a file (``.xz`` and ``.gz`` are decompressed).

    Raises:
        OSError: a local file cannot be read.
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
        if local is not None and not local.endswith(tuple(_UNPACK)):
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
        with open(local, "rb") as file:
            data = file.read()
        unpack = _UNPACK.get(os.path.splitext(local)[1])
        return unpack(data) if unpack else data

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

        with tarfile.open(local) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    inner = member.name.removeprefix("./").partition("/")[2]
                    self._files[f"{host_path}/{inner}"] = file.read()
