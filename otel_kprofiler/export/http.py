"""Sends OTLP over HTTP, with one POST per attempt, in protobuf or JSON.

Receivers are not trusted. Redirects are not followed, and cookies are not stored. At most 4 MiB of
a response are read, without decompression. An exchange that exceeds the attempt's time limit is
aborted, even if data is still arriving.
"""

import contextlib
import dataclasses
import functools
import gzip
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Unpack
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import requests
import urllib3
from requests.auth import HTTPBasicAuth
from urllib3.connection import HTTPConnection

from otel_kprofiler.abortable import SILENCED, AbortableAdapter, PlainSession
from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.client import (
    HTTP_ENDPOINT,
    PROFILES,
    ClientOptions,
    ClientSettings,
    Protocol,
    Signal,
)
from otel_kprofiler.export.connections import connect_to
from otel_kprofiler.export.http_answer import CONTENT_TYPES, Body, is_delivered, parse_response
from otel_kprofiler.export.name_lookup import ConnectError, NameLookups
from otel_kprofiler.export.retry import Answer, Verdict
from otel_kprofiler.export.sender import MAX_RESPONSE_BYTES, OtlpSender, user_agent
from otel_kprofiler.export.tls_files import TlsFiles
from otel_kprofiler.model import Batch, Form
from otel_kprofiler.redact import Secrets, redact_address

_BROKEN: Final = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
)
"""Exceptions for connection errors before or during a response."""
_TIMEOUTS: Final = (requests.Timeout, urllib3.exceptions.TimeoutError)
"""Exceptions for read and write timeouts; urllib3 raises its own while a body is being read."""


class _Adapter(AbortableAdapter):
    """Limits the time for resolving the receiver's name and connecting to any of its addresses.

    urllib3 resolves names without a limit, and applies its time limit to each address.
    """

    def __init__(self) -> None:
        self._names = NameLookups()
        self._deadline = 0.0
        self._ended = False
        self._abort_step: Callable[[], object] = lambda: None
        super().__init__()

    def begin_within(self, timeout_s: float) -> int:
        """Allow a new exchange, whose connection must be open within the time limit."""
        self._deadline = time.monotonic() + timeout_s
        return self.begin()

    def end(self) -> None:
        """Abort every running exchange; later exchanges fail. Thread-safe."""
        self._ended = True
        self.abort()
        self._abort_step()

    def _watch_step(self, abort: Callable[[], object]) -> None:
        self._abort_step = abort
        if self._ended:
            raise ConnectError("the exporter was shut down")

    def _find_opener(self, connection: Any) -> Callable[[], socket.socket]:
        if type(connection)._new_conn is not HTTPConnection._new_conn:  # noqa: SLF001 - SOCKS
            return super()._find_opener(connection)
        return functools.partial(self._open, connection)

    def _open(self, connection: HTTPConnection) -> socket.socket:
        # Unlike ``host``, this name has the dot at the end that prevents searching other domains.
        host = connection._dns_host.strip("[]"), connection.port  # noqa: SLF001
        try:
            opened = connect_to((host,), self._deadline, self._watch_step, self._names)
        except TimeoutError as error:
            raise urllib3.exceptions.ConnectTimeoutError(connection, str(error)) from error
        except ConnectError as error:
            raise urllib3.exceptions.NewConnectionError(connection, str(error)) from error
        opened.settimeout(max(0.001, self._deadline - time.monotonic()))
        return opened


class OtlpHttpExporter(OtlpSender):
    """Sends protobuf or JSON batches over HTTP.

    Args:
        endpoint: address of the receiver, or a :class:`ClientSettings` with all settings, including
            ``form`` and ``exact``.
        exact: whether to use ``endpoint`` unchanged, without appending the signal's path.
        options: other settings, by name; see :class:`ClientSettings`.

    Raises:
        ExportError: the endpoint, a header, the compression or a TLS file is unusable.
    """

    def __init__(
        self,
        endpoint: str | ClientSettings = HTTP_ENDPOINT,
        *,
        form: Form = Form.PROTOBUF,
        exact: bool = False,
        name: str = "otlp_http",
        signal: Signal = PROFILES,
        **options: Unpack[ClientOptions],
    ) -> None:
        if isinstance(endpoint, str):
            protocol: Protocol = "http/json" if form is Form.JSON else "http/protobuf"
            endpoint = ClientSettings(protocol=protocol, endpoint=endpoint, exact=exact)
        settings = dataclasses.replace(endpoint, **options)
        self._url, auth = parse_endpoint(
            settings.endpoint, path="" if settings.exact else signal.path
        )
        proxy_url, tls = settings.proxy_url, settings.tls
        proxies = [proxy_url] if proxy_url is not None else getproxies().values()
        super().__init__(
            name,
            settings,
            signal=signal,
            endpoint=redact_address(self._url),
            secrets=Secrets([settings.endpoint, *proxies], settings.headers),
        )
        self._compress = settings.does_compress()
        self._batch_form = settings.form
        if self._url.startswith("https://"):
            self._tls_files = TlsFiles(tls)
        else:
            tls.read()
        # Pass this with each request, because environment variables override the session's value.
        self._verify: bool | str = not tls.insecure_skip_verify and (tls.ca_file or True)
        self._pid = os.getpid()  # the process that opened the connection
        self._adapter = _Adapter()
        self._session = session = PlainSession(self._adapter, user_agent())
        session.trust_env = proxy_url is None
        session.proxies = {"http": proxy_url, "https": proxy_url} if proxy_url else {}
        session.cert = (tls.cert_file, tls.key_file) if tls.cert_file and tls.key_file else None
        session.auth = auth or session.auth
        session.headers.update(settings.checked_headers())
        if self._compress:
            session.headers["Content-Encoding"] = "gzip"

    def _prepare(self, batch: Batch) -> bytes:
        # A spool may hold batches encoded under an earlier configuration.
        self._batch_form = batch.form
        self._session.headers["Content-Type"] = CONTENT_TYPES[batch.form]
        return gzip.compress(batch.payload, 6, mtime=0) if self._compress else batch.payload

    def _attempt(self, body: bytes, timeout_s: float) -> Answer:
        self._leave_to_parent()
        if self._tls_files and self._tls_files.renew():
            self._session.close()  # later connections use the new TLS files
        late = threading.Event()
        exchange = self._adapter.begin_within(timeout_s)

        def abort() -> None:  # may run during a later exchange
            late.set()
            self._adapter.abort(exchange)

        # Socket timeouts apply to each read, so they do not bound a trickling response.
        timer = threading.Timer(timeout_s, abort)
        timer.daemon = True
        # Since Python 3.12, threads cannot be started during interpreter shutdown.
        with contextlib.suppress(RuntimeError):
            timer.start()
        try:
            with SILENCED.this_thread():
                return self._exchange(body, timeout_s, late)
        except _BROKEN as error:
            timed_out = late.is_set() or isinstance(error, _TIMEOUTS)
            status = "timeout" if timed_out else type(error).__name__
            # Use the inner error, because the outer error's text contains the URL with its query
            # string, which may hold a token.
            inner = error.args[0] if error.args else error
            return Answer(Verdict.RETRY, status, str(getattr(inner, "reason", inner)))
        except requests.RequestException as error:
            return Answer(Verdict.REFUSED, type(error).__name__, str(error))
        except OSError as error:  # a TLS file is missing while being replaced
            return Answer(Verdict.RETRY, type(error).__name__, str(error))
        finally:
            timer.cancel()

    def _exchange(self, body: bytes, timeout_s: float, late: threading.Event) -> Answer:
        with self._session.post(
            self._url,
            data=body,
            timeout=timeout_s,
            verify=self._verify,
            allow_redirects=False,
            stream=True,
        ) as response:
            late_text = f"no complete response in {timeout_s:.1f} s"
            if late.is_set():  # the headers of an aborted response look complete
                return Answer(Verdict.RETRY, "timeout", late_text)
            status, headers = response.status_code, response.headers
            try:
                received = _read_body(response)
            except _BROKEN as error:
                if not is_delivered(status):
                    raise
                timed_out = isinstance(error, _TIMEOUTS)
                received = Body(b"", late_text if timed_out else "it is truncated")
            # Without a Content-Length, an aborted response body looks complete.
            if late.is_set() or self._closed:
                if not is_delivered(status):
                    return Answer(Verdict.RETRY, "timeout", late_text)
                received = Body(b"", late_text)
        return parse_response(status, headers, received, self._batch_form)

    def _leave_to_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._adapter.leave_to_parent()

    def _close(self) -> None:
        self._leave_to_parent()
        self._adapter.end()
        self._session.close()


def parse_endpoint(endpoint: str, *, path: str) -> tuple[str, HTTPBasicAuth | None]:
    """Returns the address with ``path`` appended, and its credentials; raises ``ExportError``."""
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in {"http", "https"} and bool(url.hostname)
        _ = url.port  # raises if invalid
    except ValueError:  # the error's text may contain a password
        usable = False
    if not usable:
        raise ExportError(
            f"{redact_address(endpoint)!r} is not a valid HTTP endpoint",
            hint="write it as http://host:4318 or https://host",
        )
    userinfo, _, host = url.netloc.rpartition("@")
    auth = HTTPBasicAuth(*map(unquote, userinfo.partition(":")[::2])) if userinfo else None
    full_path = url.path.rstrip("/") + path if path else url.path
    return url._replace(netloc=host, path=full_path).geturl(), auth


def _read_body(response: requests.Response) -> Body:
    """Returns a response's body, not decompressed, or a problem if the body is too large."""
    content = bytearray()
    # Read once more after the end, because only that read detects a truncated response.
    while chunk := response.raw.read(65536, decode_content=False):
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            return Body(b"", f"it exceeds {MAX_RESPONSE_BYTES} bytes")
    return Body(bytes(content))
