"""Addresses of ClickHouse tables: ``clickhouse://[user:password@]host[:port]/database[?…]``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.redact import Secrets, redact_address

SCHEME: Final = "clickhouse://"
_PORT: Final = 8123
_SECURE_PORT: Final = 8443
_DATABASE: Final = "default"
_TABLE: Final = "otel_profiles"
"""Default names in the Collector's ClickHouse exporter."""
_USER: Final = "default"
_HINT: Final = (
    "use clickhouse://USER:PASSWORD@HOST:8123/DATABASE, with options such as "
    "?secure=true&table=NAME&service.version=1.2"
)
_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a profile table, with attributes that select samples from the table.

    ``port`` is the server's HTTP port. ``attributes`` have the form ``NAME=VALUE``.
    """

    host: str
    port: int
    database: str
    table: str
    user: str
    password: str = field(repr=False)
    secure: bool
    attributes: tuple[str, ...]
    secrets: Secrets = field(repr=False, compare=False)

    @property
    def place(self) -> str:
        """Returns the server and the database as text, without secrets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}/{self.database}"

    @property
    def label(self) -> str:
        """Returns the display name: the database and the attributes."""
        return " ".join((self.database, *self.attributes))


def parse_address(text: str, environ: Mapping[str, str]) -> Address:
    """Parses the address of a profile table. Only the host is required.

    If the address contains no user, ``CLICKHOUSE_USER`` and ``CLICKHOUSE_PASSWORD`` in ``environ``
    are used, so that the password need not appear in the process list. Raises ``KProfilerError`` if
    the address is malformed or not valid UTF-8.
    """
    problem = f"{redact_address(text)} is not a ClickHouse address"
    try:
        text.encode()  # ClickHouse names are UTF-8
        unquote(text, errors="strict")
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise KProfilerError(problem, hint=_HINT) from error
    database = unquote(parts.path.strip("/"))
    if not host or "/" in database or not text.startswith(SCHEME):
        raise KProfilerError(problem, hint=_HINT)
    settings = {name: value for name, value in query if "." not in name}
    secure = settings.pop("secure", "false").lower()
    table = settings.pop("table", _TABLE)
    if settings or secure not in _TRUTH or not table:
        name = next(iter(settings), "secure" if table else "table")
        raise KProfilerError(
            f"{problem}: its {name} option is unknown or has an invalid value", hint=_HINT
        )
    if parts.username:
        user, password = unquote(parts.username), unquote(parts.password or "")
    else:
        user = environ.get("CLICKHOUSE_USER", _USER)
        password = environ.get("CLICKHOUSE_PASSWORD", "")
    return Address(
        host,
        port or (_SECURE_PORT if _TRUTH[secure] else _PORT),
        database or _DATABASE,
        table,
        user,
        password,
        _TRUTH[secure],
        tuple(f"{name}={value}" for name, value in query if "." in name),
        Secrets([text.partition("?")[0]], {"password": password}),
    )
