"""Connects to a ClickHouse server, streams rows, and adds hints to errors."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from otel_kprofiler.clickhouse.address import Address
from otel_kprofiler.errors import DependencyError, KProfilerError

_CONNECT_S: Final = 10
_QUERY_S: Final = 300
_CODE: Final = re.compile(r"\bcode:? *(\d+)", re.IGNORECASE)
_LESS: Final = "narrow the query with --from and --to, --service or --process"
_FIXES: Final = {
    "60": "use the database (and ?table=NAME) of the Collector's clickhouse exporter, which "
    "creates the table when it starts with a pipeline of profiles",
    "81": "use the database that the Collector's clickhouse exporter writes to",
    "47": "use a table created by v0.161 or later of the Collector's clickhouse exporter",
    "497": "let the user read the table: GRANT SELECT",
    "516": "specify the user: clickhouse://USER:PASSWORD@HOST/…, or CLICKHOUSE_USER and "
    "CLICKHOUSE_PASSWORD",
    "159": _LESS,
    "241": _LESS,
}
"""Hints, keyed by server error code (listed in ClickHouse's ``system.errors``)."""
_REACH: Final = "use the port of the HTTP interface, by default 8123, or 8443 with ?secure=true"
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_TRUST: Final = "set SSL_CERT_FILE to its CA certificate, and use the host name in its certificate"
_MAX_MESSAGE: Final = 300

Row = Sequence[Any]


class Connection:
    """A connection to a ClickHouse server; not thread-safe.

    Raises ``DependencyError`` if the client library is not installed, and ``KProfilerError`` if the
    server does not respond, or rejects the user.
    """

    def __init__(self, address: Address) -> None:
        try:
            import clickhouse_connect  # noqa: PLC0415 - optional
            from clickhouse_connect.driver.exceptions import ClickHouseError  # noqa: PLC0415
            from clickhouse_connect.driver.httputil import get_pool_manager  # noqa: PLC0415
            from urllib3.exceptions import HTTPError  # noqa: PLC0415
        except ImportError as error:
            raise DependencyError(
                "reading profiles from ClickHouse requires clickhouse-connect, which cannot be "
                f"imported: {error}",
                hint="pip install 'otel-kprofiler[clickhouse]'",
            ) from error
        self._address = address
        # The library logs errors that it also raises.
        logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
        self._errors = (ClickHouseError, HTTPError, OSError)
        self._pool = get_pool_manager()
        try:
            with self._explained():
                self._client = clickhouse_connect.get_client(
                    host=address.host,
                    port=address.port,
                    username=address.user,
                    password=address.password,
                    secure=address.secure,
                    connect_timeout=_CONNECT_S,
                    send_receive_timeout=_QUERY_S,
                    query_retries=0,
                    autogenerate_session_id=False,  # a session does not allow concurrent queries
                    client_name="otel-kprofiler",
                    pool_mgr=self._pool,
                )
        except BaseException:
            self._pool.clear()
            raise

    def close(self) -> None:
        """Close the connection to the server."""
        self._client.close()
        self._pool.clear()

    def rows(self, query: str) -> Iterator[Row]:
        """Yields the rows of a query."""
        for block in self.blocks(query):
            yield from block

    def blocks(self, query: str) -> Iterator[Sequence[Row]]:
        """Yields a query's rows in blocks, as the server sends them.

        Raises ``KProfilerError`` if the server cannot be reached, or rejects the query.
        """
        with self._explained(), self._client.query_row_block_stream(query) as stream:
            yield from stream

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            place = self._address.place
            text = " ".join(self._address.secrets.redact(_words(error)).split())
            match = _CODE.search(text)
            code = str(getattr(error, "code", None) or (match[1] if match else ""))
            what = f"{place} rejects" if code else f"cannot read {place}"
            hint = _FIXES.get(code, "") if code else _TRUST if _UNTRUSTED in text else _REACH
            raise KProfilerError(f"{what}: {text[:_MAX_MESSAGE]}", hint=hint) from None


def _words(error: BaseException) -> str:
    """Returns the operating system's message if there is one, else the library's message."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return str(error)
