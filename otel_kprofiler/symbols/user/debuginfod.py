"""Finds debug files on debuginfod servers by build id, and caches them on disk.

Protocol: debuginfod(8), "WEBAPI". Servers are not trusted. The compressed and decompressed sizes of
responses are limited, and only ELF files with the requested build id are used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from otel_kprofiler.elf import ElfError, FileSource, read_debug_elf
from otel_kprofiler.errors import describe_error
from otel_kprofiler.host import CacheDirectory, write_all
from otel_kprofiler.redact import redact_address
from otel_kprofiler.symbols.user.debug_files import DebugFile, WantedDebugFile
from otel_kprofiler.version import __version__

if TYPE_CHECKING:
    import requests

_BUILD_ID: Final = re.compile("(?:[0-9a-f]{2}){2,64}")
_CHUNK_BYTES: Final = 1 << 16
_MAX_REDIRECTS: Final = 3
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 600.0
_log: Final = logging.getLogger(__name__)


class DownloadLimits(NamedTuple):
    """Limits on a download. Times are in seconds.

    Attributes:
        connect_s: time limit for connecting to a server, and for each read from its response.
        missing_s: delay before a file that no server had is requested again.
    """

    file_bytes: int = 1 << 30
    connect_s: float = 5.0
    total_s: float = 90.0
    missing_s: float = 600.0


DEFAULT_LIMITS: Final = DownloadLimits()


class _DownloadError(Exception):
    """Raised for an invalid response from a server."""


@dataclass(slots=True)
class _Server:
    """A server, its consecutive failure count, and the monotonic time of the next attempt."""

    address: str
    failures: int = 0
    not_before_s: float = 0.0


class Debuginfod:
    """Finds debug files on debuginfod servers. Thread-safe; downloads one file at a time.

    Lookups block for up to ``total_s`` per server, so sampling threads must not perform lookups. A
    server that fails is skipped for 5 seconds. Each further failure doubles the delay, up to 10
    minutes.

    Args:
        servers: http or https URLs, by preference; invalid URLs are ignored with a warning.
        cache: stores downloaded files, and the build ids for which no server has a file.
    """

    def __init__(
        self,
        servers: Sequence[str],
        cache: CacheDirectory,
        limits: DownloadLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = []
        for address in servers:
            if _is_usable(address):
                self._servers.append(_Server(address.rstrip("/")))
            else:
                _log.warning(
                    "ignoring an invalid debuginfod server URL: %s",
                    redact_address(address),
                )
        self._cache, self._limits, self._clock = cache, limits, clock
        self._lock = threading.Lock()

    def find(self, wanted: WantedDebugFile) -> Iterator[DebugFile]:
        """Yields the opened debug file with the requested build id, if a server has it."""
        build_id = wanted.build_id
        if build_id and (fd := self.fetch(build_id)) is not None:
            source = FileSource(fd, os.fstat(fd).st_size)
            name = _name(build_id)
            path = os.path.join(self._cache.path, name)
            try:
                elf = read_debug_elf(source)
            except ElfError as error:  # corrupt on disk
                _log.warning("%s: %s", path, error)
                self._cache.remove(name)
                os.close(fd)
            else:
                yield DebugFile(path, fd, source, elf)

    def fetch(self, build_id: str) -> int | None:
        """Opens a debug file, downloading it if needed; None if no server has the file.

        The caller closes the descriptor. ``build_id`` must be in lower-case hexadecimal.
        """
        if not _BUILD_ID.fullmatch(build_id):
            return None
        name = _name(build_id)
        with self._lock:
            if (fd := self._cache.open(name)) is not None:
                return fd
            age = self._cache.age_s(f"{name}.missing", time.time())
            if age is not None and 0 <= age < self._limits.missing_s:
                return None
            try:
                return self._download(build_id, name)
            except OSError as error:
                _log.warning("cannot cache a debug file: %s", describe_error(error))
                return None

    def _download(self, build_id: str, name: str) -> int | None:
        missing = bool(self._servers)
        for server in self._servers:
            if self._clock() < server.not_before_s:
                missing = False
                continue
            try:
                fd = self._ask(server, build_id, name)
            except _DownloadError as error:
                missing = False
                pause = min(_FIRST_PAUSE_S * 2**server.failures, _LONGEST_PAUSE_S)
                server.failures = min(server.failures + 1, 16)
                server.not_before_s = self._clock() + pause
                _log.warning(
                    "debuginfod server %s: %s; skipping it for %g s",
                    redact_address(server.address), error, pause,
                )  # fmt: skip
                continue
            server.failures = 0
            if fd is not None:
                return fd
        if missing:
            self._cache.create(f"{name}.missing").finish()
            self._cache.trim()
        return None

    def _ask(self, server: _Server, build_id: str, name: str) -> int | None:
        file = self._cache.create(name)
        try:
            address = f"{server.address}/buildid/{build_id}/debuginfo"
            if not _Download(self._limits).run(address, file.fd):
                return None
            _check(file.fd, build_id)
            file.finish()
        finally:
            file.abandon()
        self._cache.trim()
        return self._cache.open(name)


class _Download:
    """A download with a time limit, which applies even if data trickles in."""

    def __init__(self, limits: DownloadLimits) -> None:
        # Import ``requests`` only when there is a file to download.
        from otel_kprofiler.abortable import AbortableAdapter, PlainSession  # noqa: PLC0415

        self._limits = limits
        self._adapter = AbortableAdapter()
        self._late = threading.Event()
        self._session = PlainSession(self._adapter, f"otel-kprofiler/{__version__}")
        self._session.headers["Connection"] = "close"

    def run(self, address: str, target: int) -> bool:
        """Downloads a file and writes it to the descriptor ``target``.

        Returns False if the server does not have the file. Raises ``_DownloadError`` if the
        download fails, or ``OSError`` if the file cannot be written.
        """
        import requests  # noqa: PLC0415
        import urllib3  # noqa: PLC0415

        from otel_kprofiler.abortable import SILENCED  # noqa: PLC0415

        timer = threading.Timer(self._limits.total_s, self._abort)
        timer.daemon = True
        timer.start()
        try:
            with SILENCED.this_thread():
                return self._follow(address, target)
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            cause = "the download took too long" if self._late.is_set() else type(error).__name__
            raise _DownloadError(cause) from error
        finally:
            timer.cancel()
            self._session.close()

    def _abort(self) -> None:
        self._late.set()
        self._adapter.abort()

    def _follow(self, address: str, target: int) -> bool:
        for _ in range(_MAX_REDIRECTS + 1):
            with self._session.get(
                address, timeout=self._limits.connect_s, stream=True
            ) as response:
                if not response.is_redirect:
                    return self._receive(response, target)
                address = _redirected(address, response.headers["Location"])
        raise _DownloadError("redirects too often")

    def _receive(self, response: requests.Response, target: int) -> bool:
        if response.status_code == 404:
            return False
        if response.status_code != 200:
            raise _DownloadError(f"status {response.status_code}")
        length = response.headers.get("Content-Length", "0")
        left = self._limits.file_bytes
        if length.isdecimal() and int(length[:20]) > left:
            raise _DownloadError(f"offered {length[:20]} bytes, more than the limit")
        # A final read is the only way to detect a truncated response. Some proxies
        # compress files without being asked to. The build id is checked after decompression.
        while chunk := response.raw.read(_CHUNK_BYTES, decode_content=True):
            left -= len(chunk)
            if left < 0:
                raise _DownloadError(f"sent more than the limit of {self._limits.file_bytes} bytes")
            write_all(target, chunk)
        if self._late.is_set():  # without a Content-Length, an aborted response looks complete
            raise _DownloadError("the download took too long")
        return True


def find_servers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the servers in ``DEBUGINFOD_URLS``, without signature policies (``ima:…``)."""
    words = environ.get("DEBUGINFOD_URLS", "").split()
    return tuple(word for word in words if not word.startswith("ima:"))


def _redirected(address: str, location: str) -> str:
    """Returns the target of a redirect. Rejects redirects from https to http."""
    with contextlib.suppress(ValueError):
        following = urljoin(address, location)
        weaker = address.startswith("https:") and not following.startswith("https:")
        if _is_usable(following) and not weaker:
            return following
    raise _DownloadError(f"redirected to the disallowed URL {redact_address(location)}")


def _is_usable(address: str) -> bool:
    try:
        url = urlsplit(address)
        _ = url.port  # raises if the port is invalid
    except ValueError:
        return False
    return url.scheme in {"http", "https"} and bool(url.hostname)


def _name(build_id: str) -> str:
    return f"{build_id}.debuginfo"


def _check(fd: int, build_id: str) -> None:
    try:
        received_id = read_debug_elf(FileSource(fd, os.fstat(fd).st_size)).build_id
    except ElfError as error:
        raise _DownloadError(f"sent a file that is not a debug file ({error})") from error
    if received_id != build_id:
        raise _DownloadError(f"sent a file with the wrong build id, {received_id}")
