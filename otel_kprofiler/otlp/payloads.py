"""Parses bytes into messages: detects the serialization, splits messages, rejects old layouts.

There are three forms: a bare protobuf message; protobuf messages with a four-byte big-endian length
prefix (the Collector's file exporter, ``format: proto``); and JSON with one message per line.
"""

import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp.json_read import fill_message
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest
from otel_kprofiler.reading import Readable, read_up_to

MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
MAX_FILE_BYTES: Final = 2 * 1024 * 1024 * 1024
MAX_NOTES: Final = 1000

_LENGTH_BYTES: Final = 4
_ZEROS: Final = re.compile(rb"\0*")
_FIRST_TAG: Final = 8
"""Lowest first byte of a protobuf message (field 1). The first byte of a length prefix is lower if
the length is below 128 MiB."""

_OLD_ATTRIBUTES_FIELD: Final = 3
"""Field number of ``Sample.attribute_indices`` before opentelemetry-proto 1.43."""
_JSON_SPACE: Final = b" \t\r\n"
"""Whitespace in JSON (RFC 8259). JSON data with any other whitespace is malformed."""


class Note(NamedTuple):
    """A rule violation that is visible only in the serialized form."""

    rule: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Payload:
    """A message, its deviations from the format, and the JSON it was parsed from, if any."""

    message: Any
    notes: tuple[Note, ...] = ()
    tree: Any = None


class Framing(enum.Enum):
    """The framing of messages in a file."""

    ONE = "one protobuf message"
    PREFIXED = "protobuf messages, each with a length prefix"
    JSON = "JSON, one message per line"

    def join(self, messages: Iterable[bytes]) -> bytes:
        """Join messages into file contents. :attr:`ONE` accepts at most one message."""
        if self is Framing.JSON:
            return b"".join([message + b"\n" for message in messages])
        if self is Framing.PREFIXED:
            return b"".join([
                part
                for message in messages
                for part in (len(message).to_bytes(_LENGTH_BYTES, "big"), message)
            ])  # fmt: skip
        return b"".join(messages)


def detect_framing(data: bytes) -> Framing:
    """Detect the framing of serialized requests from their first bytes."""
    if data.lstrip(_JSON_SPACE)[:1] == b"{" and not _is_message_like_json(data):
        return Framing.JSON
    return Framing.PREFIXED if data[:1] < bytes([_FIRST_TAG]) else Framing.ONE


class TruncatedError(PayloadError):
    """Raised if the last message is truncated, as in a file that is still being written."""


class DamagedProfilesError(PayloadError):
    """Raised if ``count`` profiles in a message are malformed; describes the first problem."""

    def __init__(self, error: PayloadError, count: int) -> None:
        super().__init__(error.message, hint=error.hint)
        self.count = count


OnDamage = Callable[[PayloadError], None]
"""Function that receives the error for each unreadable message, and may raise it."""


def refuse(error: PayloadError) -> None:
    """Raise the error. This function is the default ``on_damage``."""
    raise error


def parse_payloads(data: bytes, on_damage: OnDamage = refuse) -> Iterator[Payload]:
    """Parse serialized requests in any supported form (see the module's docstring).

    JSON may also be a single document spanning several lines. ``on_damage`` is called for each
    unreadable message. If ``on_damage`` returns, the message is skipped. By default, raises
    ``PayloadError`` if the data is not OTLP profiles, or predates opentelemetry-proto 1.43.
    """
    if not data.strip(_JSON_SPACE):
        return
    framing = detect_framing(data)
    if framing is Framing.JSON:
        yield from _parse_json(data, on_damage)
    elif framing is Framing.PREFIXED:
        yield from _parse_prefixed(data, on_damage)
    else:
        yield from _parse(partial(_parse_message, data), on_damage)


def _parse(parse: Callable[[], Payload], on_damage: OnDamage, where: str = "") -> Iterator[Payload]:
    try:
        payload = parse()
    except PayloadError as error:
        message = f"{where}: {error.message}" if where else error.message
        on_damage(type(error)(message, hint=error.hint))
    else:
        yield payload


def _is_message_like_json(data: bytes) -> bool:
    """Returns whether data is protobuf that looks like JSON: field 1 is 123 bytes long (``{``)."""
    if not data.startswith(b"\n{"):
        return False
    try:
        ExportProfilesServiceRequest.FromString(data)
    except DecodeError:
        return False
    return True


def read_file(path: str) -> bytes:
    """Returns a file's content.

    Raises ``OSError`` if the file cannot be read, and ``PayloadError`` if the file is too large.
    """
    with open(path, "rb") as file:
        return read_stream(file, path)


def read_stream(stream: Readable, name: str) -> bytes:
    """Returns a stream's content, as :func:`read_file` does; ``name`` is used in error messages."""
    content = read_up_to(stream, MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise PayloadError(
            f"{name} is larger than {MAX_FILE_BYTES >> 30} GiB", hint="split it between messages"
        )
    return content


def _check_size(data: bytes) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise PayloadError(f"a message is larger than {MAX_MESSAGE_BYTES >> 20} MiB")


def _parse_message(data: bytes) -> Payload:
    _check_size(data)
    try:
        message = ExportProfilesServiceRequest.FromString(data)
    except DecodeError as error:
        raise PayloadError(f"not a protobuf message with OTLP profiles ({error})") from error
    for resource_profiles in message.resource_profiles:
        for scope_profiles in resource_profiles.scope_profiles:
            for profile in scope_profiles.profiles:
                for sample in profile.samples:
                    _refuse_old_layout(sample)
    return Payload(message)


def _refuse_old_layout(sample: Any) -> None:
    for unknown in UnknownFieldSet(sample):  # type: ignore[attr-defined]
        if unknown.field_number == _OLD_ATTRIBUTES_FIELD:
            raise PayloadError(
                "samples use a layout older than opentelemetry-proto 1.43"
                " (attribute_indices in field 3)",
                hint="rewrite the file with a current version of its producer",
            )


def _parse_prefixed(data: bytes, on_damage: OnDamage) -> Iterator[Payload]:
    position = 0
    while position < len(data):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(data[position:start], "big")
        where = f"message at byte {position}"
        if end > len(data) or start > len(data):
            on_damage(TruncatedError(f"the {where} is truncated"))
            return
        if end == start:  # empty messages, as many as a file's zeroed tail holds
            zeros = _ZEROS.match(data, position)
            assert zeros  # noqa: S101 - the pattern also matches no zeros
            position += len(zeros[0]) // _LENGTH_BYTES * _LENGTH_BYTES
            continue
        yield from _parse(partial(_parse_message, data[start:end]), on_damage, where)
        position = end


def _parse_json(data: bytes, on_damage: OnDamage) -> Iterator[Payload]:
    lines = data.splitlines()
    if len(lines) > 1 and _is_one_document(lines[0]):
        lines = [data]
    for number, line in enumerate(lines, 1):
        if not line.strip(_JSON_SPACE):
            continue
        is_partial = number == len(lines) > 1 and not data.endswith(b"\n")
        yield from _parse(partial(_parse_line, line, is_partial), on_damage, f"line {number}")


def _is_one_document(first_line: bytes) -> bool:
    try:
        json.loads(first_line)
    except (ValueError, RecursionError):
        return True
    return False


def _parse_line(line: bytes, is_partial: bool) -> Payload:
    _check_size(line)
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise (TruncatedError if is_partial else PayloadError)(f"invalid JSON ({error})") from error
    message = ExportProfilesServiceRequest()
    notes: list[Note] = []

    def note(rule: str, where: str, text: str) -> None:
        if len(notes) < MAX_NOTES:
            notes.append(Note(rule, where, text))

    fill_message(message, tree, note)
    return Payload(message, tuple(notes), tree)
