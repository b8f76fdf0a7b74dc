"""What may be shown of addresses and messages that can hold secrets."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import unquote, unquote_plus

REDACTED: Final = "[REDACTED]"

_SHORTEST: Final = 4
"""Characters; anything shorter is part of ordinary words and says little."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)?(.*)", re.DOTALL)


def redact_address(address: str) -> str:
    """An address, well-formed or not, without user, password, query and fragment.

    Everything before the last ``@`` counts as a password, which may hold any character.
    """
    scheme, rest = _split_scheme(address)
    userinfo, _, place = rest.rpartition("@")
    shown = re.split(r"[?#]", place, maxsplit=1)
    hidden = f"{REDACTED}@" if userinfo else ""
    return f"{scheme}{hidden}{shown[0]}" + (f"?{REDACTED}" if len(shown) > 1 else "")


def has_secrets(address: str) -> bool:
    """Whether an address holds something that :func:`redact_address` leaves out."""
    return redact_address(address) != address


class Secrets:
    """The secrets of one connection, to be struck out of what libraries and receivers say.

    Args:
        addresses: of receiver and proxies; their passwords and queries are secrets.
        headers: whose values are secrets.
    """

    def __init__(self, addresses: Iterable[str], headers: Mapping[str, str]) -> None:
        found = {secret for address in addresses for secret in _secrets_of(address)}
        for value in headers.values():
            found |= {value, value.partition(" ")[2]}  # the token behind ``Bearer``
        ordered = sorted(filter(lambda text: len(text) >= _SHORTEST, found), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def strike_out(self, text: str) -> str:
        """The text without the secrets."""
        return self._pattern.sub(REDACTED, text)

    def strike_out_of(self, error: BaseException | None) -> None:
        """Take the secrets out of an exception that nobody expected, and of its causes."""
        while error is not None:
            error.args = tuple(
                arg if isinstance(arg, int) else self.strike_out(str(arg)) for arg in error.args
            )
            error = error.__cause__ or error.__context__


def _split_scheme(address: str) -> tuple[str, str]:
    match = _SCHEME.fullmatch(address)
    return (match[1] or "", match[2]) if match else ("", address)


def _secrets_of(address: str) -> Iterator[str]:
    rest = _split_scheme(address)[1]
    userinfo, _, place = rest.rpartition("@")
    if userinfo:
        plain = unquote(userinfo)
        yield from (userinfo, plain, base64.b64encode(plain.encode()).decode())
        yield from (userinfo.partition(":")[2], unquote(userinfo.partition(":")[2]))
    query = "".join(re.split(r"[?#]", place, maxsplit=1)[1:])
    yield query
    for value in (pair.partition("=")[2] for pair in query.split("&")):
        yield from (value, unquote_plus(value))
