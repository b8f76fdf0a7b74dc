"""Redacts secrets in URLs and messages."""

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import unquote, unquote_plus

REDACTED: Final = "[REDACTED]"

_SHORTEST: Final = 4
"""Minimum length of a redacted secret. Shorter strings occur in common words."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)?(.*)", re.DOTALL)


def redact_address(address: str) -> str:
    """Redact the user, password, query and fragment in an address, even a malformed one.

    Everything before the last ``@`` is redacted, because a password may contain any character.
    """
    scheme, rest = _split_scheme(address)
    userinfo, _, place = rest.rpartition("@")
    shown = re.split(r"[?#]", place, maxsplit=1)
    hidden = f"{REDACTED}@" if userinfo else ""
    return f"{scheme}{hidden}{shown[0]}" + (f"?{REDACTED}" if len(shown) > 1 else "")


def has_secrets(address: str) -> bool:
    """Returns whether :func:`redact_address` would change an address."""
    return redact_address(address) != address


class Secrets:
    """In messages, redacts passwords and queries in ``addresses``, and values in ``headers``."""

    def __init__(self, addresses: Iterable[str], headers: Mapping[str, str]) -> None:
        secrets = {secret for address in addresses for secret in _secrets_of(address)}
        for value in headers.values():
            secrets |= {value, value.partition(" ")[2]}  # the token after ``Bearer``
        ordered = sorted(
            filter(lambda text: len(text) >= _SHORTEST, secrets), key=len, reverse=True
        )
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def redact(self, text: str) -> str:
        """Redact the secrets in a string."""
        return self._pattern.sub(REDACTED, text)

    def redact_error(self, error: BaseException | None) -> None:
        """Redact the secrets in an unexpected exception and its causes, in place."""
        while error is not None:
            error.args = tuple(
                arg if isinstance(arg, int) else self.redact(str(arg)) for arg in error.args
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
