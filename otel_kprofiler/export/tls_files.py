"""Reads TLS files that may be replaced while in use, and diagnoses problems with these files.

A renewal replaces the certificate and the key one after the other. In between, the files do not
match, or one is missing. Until the files match again, the existing connection remains in use.
"""

import os
import re
import ssl
from datetime import UTC, datetime
from typing import Final

from otel_kprofiler.errors import ExportError
from otel_kprofiler.export.client import Tls

Contents = tuple[bytes | None, bytes | None, bytes | None]
"""Contents of the CA, certificate and key files; None for files that are not configured."""

NO_PASSWORD: Final = ""
"""Makes OpenSSL reject an encrypted key, instead of asking for its password on the terminal."""

_FIXES: Final = (
    ("certificate has expired", "renew the receiver's certificate"),
    ("certificate is not yet valid", "compare the clocks of both hosts"),
    (
        r"hostname mismatch|hostname verification check failed|IP address mismatch",
        "set endpoint to a name in the receiver's certificate",
    ),
    (
        r"self.signed certificate|unable to get (local )?issuer",
        "set tls.ca_file to the certificate of the authority that signed the receiver's",
    ),
    (
        r"protocol.version|unsupported.protocol",
        "enable TLS 1.2 or newer in the receiver",
    ),
    (
        r"alert certificate revoked|revoked",
        "the client certificate is revoked: use a new one in tls.cert_file",
    ),
    (
        r"certificate required|PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "the receiver requires a client certificate: set tls.cert_file and tls.key_file",
    ),
)
"""Handshake error messages from OpenSSL, and their fixes."""
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_SEQUENCE: Final = 0x30
_UTC_TIME: Final = 0x17
_VERSION: Final = 0xA0


class TlsFiles:
    """The TLS files of a client; ``contents`` are from the last successful read. Not thread-safe.

    The constructor raises ``ExportError`` under the same conditions as :meth:`Tls.read`.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen = self._look()
        self.contents: Contents = tls.read()

    def renew(self) -> bool:
        """Reread changed files, and return whether they have new, usable contents."""
        seen = self._look()
        if seen == self._seen or self.find_problem():
            return False
        try:
            contents = self._tls.read()
        except ExportError:  # a file has just been removed; the next call retries the read
            return False
        self._seen = seen
        is_new, self.contents = contents != self.contents, contents
        return is_new

    def find_problem(self) -> str:
        """Returns a problem with the files and how to fix it; empty if there is none."""
        tls = self._tls
        try:
            tls.read()
        except ExportError as error:
            return f"{error}: {error.hint}"
        if not tls.cert_file or not tls.key_file:
            return ""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(tls.cert_file, tls.key_file, NO_PASSWORD)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or str(error)
            return (
                f"the client certificate {tls.cert_file} and the key {tls.key_file} cannot be used"
                f" together ({reason}): replace both"
            )
        return _find_invalid(tls.cert_file, datetime.now(UTC))

    def _look(self) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        for path in (self._tls.ca_file, self._tls.cert_file, self._tls.key_file):
            try:
                status = os.stat(path) if path else None
            except OSError as error:
                seen.append((error.errno or 0,))
                continue
            if status:
                seen.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return seen


def find_fix(message: str) -> str:
    """Returns the fix for a failed TLS handshake; empty if the error message is unknown."""
    for pattern, fix in _FIXES:
        if re.search(pattern, message.replace("_", " ") + message, re.IGNORECASE):
            return fix
    return ""


def _find_invalid(path: str, now: datetime) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        rest = file.read().partition(_BEGIN)[2]
    pem = f"{_BEGIN}{rest.partition('-----END')[0]}-----END CERTIFICATE-----\n"
    try:
        start, end = parse_validity(ssl.PEM_cert_to_DER_cert(pem))
    except ValueError:  # OpenSSL accepts the certificate, so only its dates are unreadable
        return ""
    if now > end:
        return f"the client certificate {path} expired on {end:%Y-%m-%d %H:%M} UTC: renew it"
    if now < start:
        return (
            f"the client certificate {path} is not valid before {start:%Y-%m-%d %H:%M} UTC:"
            " check this host's clock"
        )
    return ""


def parse_validity(der: bytes) -> tuple[datetime, datetime]:
    """Parses a certificate's validity (RFC 5280, 4.1.2.5); raises ``ValueError`` if malformed."""
    _, certificate, _ = _read_value(der, _SEQUENCE)
    _, body, _ = _read_value(certificate, _SEQUENCE)
    tag, _, rest = _read_value(body)
    if tag == _VERSION:
        _, _, rest = _read_value(rest)  # the serial number
    for _ in ("signature", "issuer"):
        _, _, rest = _read_value(rest, _SEQUENCE)
    _, validity, _ = _read_value(rest, _SEQUENCE)
    first, start, rest = _read_value(validity)
    last, end, _ = _read_value(rest)
    return _parse_time(first, start), _parse_time(last, end)


def _read_value(data: bytes, expected: int | None = None) -> tuple[int, bytes, bytes]:
    """Returns the tag and content of a DER value, and the bytes after the value."""
    if len(data) < 2 or (expected is not None and data[0] != expected):
        raise ValueError("the certificate has an invalid value")
    length, at = data[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(data[2:at], "big")
    if at + length > len(data):
        raise ValueError("the certificate is truncated")
    return data[0], data[at : at + length], data[at + length :]


def _parse_time(tag: int, text: bytes) -> datetime:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)
