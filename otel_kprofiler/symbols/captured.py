"""Provides a host's files from captured copies: single files, directories and tar archives."""

import os
from bisect import bisect_left
from collections.abc import Mapping
from io import BytesIO
from itertools import islice, takewhile

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import open_in_memory
from otel_kprofiler.reading import read_up_to
from otel_kprofiler.symbols.compressed import (
    COMPRESSED_SUFFIXES,
    MAX_UNPACKED_BYTES,
    check_size,
    is_compressed,
    unpack,
)


class CapturedFiles:
    """Reads a host's files from captured copies; implements ``HostFiles``.

    Args:
        sources: the local paths, by host path. Each local path is a file, a directory, or a tar
            archive with a single top-level directory, which is stripped. Files compressed with xz,
            gzip or zstd are decompressed.

    Raises:
        OSError: a local file does not exist, or an archive cannot be read.
        KProfilerError: an archive is corrupt, or decompresses to more than 1 GiB.
    """

    def __init__(self, sources: Mapping[str, str | os.PathLike[str]]) -> None:
        self._files: dict[str, bytes] = {}
        self._paths: dict[str, str] = {}
        for host_path, source in sources.items():
            local = os.fspath(source)
            if is_archive(local):
                self._add_archive(host_path, local)
            else:
                os.stat(local)
                self._paths[host_path] = local
        self._ordered = sorted(self._files)

    def open_fd(self, path: str) -> int:
        """Opens a file, which the caller closes. Raises the same errors as :meth:`read_bytes`."""
        local = self._local(path)
        if local is not None:
            descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC)
            try:
                compressed = is_compressed(local, os.pread(descriptor, 8, 0))
            except OSError:  # not seekable, or an error that a later read will report
                return descriptor
            if not compressed:
                return descriptor
            os.close(descriptor)
        return open_in_memory(os.path.basename(path), self.read_bytes(path))

    def read_bytes(self, path: str) -> bytes:
        """Returns the entire contents of a file.

        Raises ``OSError``, or ``KProfilerError`` if the file is corrupt or decompresses to more
        than 1 GiB.
        """
        local = self._local(path)
        if local is None:
            if path not in self._files:
                raise FileNotFoundError(2, os.strerror(2), path)
            return self._files[path]
        return _read(local)

    def list_dir(self, path: str) -> list[str]:
        """Returns the sorted names in a directory."""
        local = self._local(path)
        if local is not None:
            return sorted(os.listdir(local))
        folder = path + "/"
        first = bisect_left(self._ordered, folder)
        inside = takewhile(lambda name: name.startswith(folder), islice(self._ordered, first, None))
        names = {name[len(folder) :].partition("/")[0] for name in inside}
        if not names:
            raise FileNotFoundError(2, os.strerror(2), path)
        return sorted(names)

    def read_link(self, path: str) -> str:
        """Returns the target of a symbolic link."""
        local = self._local(path)
        if local is None:
            raise FileNotFoundError(2, os.strerror(2), path)
        return os.readlink(local)

    def _local(self, path: str) -> str | None:
        """Returns the local path of a host file's copy; None if it is in an archive or missing."""
        folder, rest = path, ""
        while folder.strip("/"):
            if folder in self._paths:
                return self._paths[folder] + rest
            folder, _, name = folder.rpartition("/")
            rest = f"/{name}{rest}"
        return None

    def _add_archive(self, host_path: str, local: str) -> None:
        import tarfile  # noqa: PLC0415  # takes 10 ms; only for archives

        data = _read(local)
        size = 0
        try:
            with tarfile.open(fileobj=BytesIO(data)) as archive:
                for member in archive:
                    size += member.size  # sparse files are larger than their data in the archive
                    check_size(local, size)
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is not None:
                        inner = member.name.removeprefix("./").partition("/")[2]
                        self._files[f"{host_path}/{inner}"] = file.read()
                end = archive.offset
                if data[end : end + tarfile.BLOCKSIZE] != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"no tar member starts at byte {end}")
        except (tarfile.TarError, ArithmeticError, EOFError, RecursionError, ValueError) as error:
            raise KProfilerError(
                f"{local} is not a readable tar archive: {error}",
                hint="copy the file again; it is corrupt or incomplete",
            ) from error


def _read(local: str) -> bytes:
    with open(local, "rb") as file:
        data = read_up_to(file, MAX_UNPACKED_BYTES + 1)
    check_size(local, len(data))
    return bytes(unpack(local, data))


def is_archive(path: str) -> bool:
    """Returns whether a file name denotes a tar archive, compressed or not."""
    stem, suffix = os.path.splitext(path)
    return (stem if suffix in COMPRESSED_SUFFIXES else path).endswith(".tar")
