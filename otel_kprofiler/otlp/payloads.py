"""Parses bytes into messages: detects the form, splits messages, refuses old layouts.

Three forms: one bare protobuf message; protobuf messages with a four-byte big-endian length prefix
(the Collector's file exporter, ``format: proto``); JSON, one message per line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.otlp.json_read import fill_message
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest

MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
MAX_FILE_BYTES: Final = 2 * 1024 * 1024 * 1024
MAX_NOTES: Final = 1000
"""Limit of deviations noted per message."""

_LENGTH_BYTES: Final = 4
_FIRST_TAG: Final = 8
"""Smallest first byte of a protobuf message: field 1. A length below 128 MiB starts lower."""

_OLD_ATTRIBUTES_FIELD: Final = 3
"""Field of ``Sample.attribute_indices`` before opentelemetry-proto 1.43."""


class Note(NamedTuple):
    """A deviation from a rule that only the serialized form shows."""

    rule: str
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Payload:
    """One message and the deviations noted while reading it."""

    message: Any
    notes: tuple[Note, ...] = ()


def parse_payloads(data: bytes, *, partial_end: bool = False) -> Iterator[Payload]:
    """Parse serialized requests of any of the three forms.

    Args:
        data: the bytes of a message or of a whole file.
        partial_end: ignore a truncated last line or length-prefixed message, as in a file that is
            still being written.

    Raises:
        PayloadError: the data is not OTLP profiles, or has the layout before 1.43.
    """
    if not data.strip():
        return
    if data.lstrip()[:1] == b"{" and not _is_message_like_json(data):
        yield from _parse_json(data, partial_end)
    elif data[0] < _FIRST_TAG:
        yield from _parse_prefixed(data, partial_end)
    else:
        yield Payload(_parse_message(data))


def _is_message_like_json(data: bytes) -> bool:
    """Whether a protobuf message looks like JSON: a line feed and a brace, field 1 of 123 bytes."""
    if not data.startswith(b"\n{"):
        return False
    try:
        ExportProfilesServiceRequest.FromString(data)
    except DecodeError:
        return False
    return True


def read_file(path: str) -> bytes:
    """Content of a file of OTLP profiles.

    Raises:
        OSError: it cannot be read.
        PayloadError: it is larger than :data:`MAX_FILE_BYTES`.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise PayloadError(
            f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB", hint="split it by its messages"
        )
    return content


def _check_size(data: bytes) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise PayloadError(f"a message is larger than {MAX_MESSAGE_BYTES >> 20} MiB")


def _parse_message(data: bytes) -> Any:
    _check_size(data)
    try:
        message = ExportProfilesServiceRequest.FromString(data)
    except DecodeError as error:
        raise PayloadError(f"not a protobuf message of OTLP profiles: {error}") from error
    for resource_profiles in message.resource_profiles:
        for scope_profiles in resource_profiles.scope_profiles:
            for profile in scope_profiles.profiles:
                for sample in profile.samples:
                    _refuse_old_layout(sample)
    return message


def _refuse_old_layout(sample: Any) -> None:
    for unknown in UnknownFieldSet(sample):  # type: ignore[attr-defined]
        if unknown.field_number == _OLD_ATTRIBUTES_FIELD:
            raise PayloadError(
                "samples have the layout before opentelemetry-proto 1.43"
                " (attribute_indices in field 3)",
                hint="write the file again with a current version of its producer",
            )


def _parse_prefixed(data: bytes, partial_end: bool) -> Iterator[Payload]:
    position = 0
    while position < len(data):
        start = position + _LENGTH_BYTES
        end = start + int.from_bytes(data[position:start], "big")
        if end > len(data) or start > len(data):
            if not partial_end:
                raise PayloadError(f"the message at byte {position} is truncated")
            return
        yield Payload(_parse_message(data[start:end]))
        position = end


def _parse_json(data: bytes, partial_end: bool) -> Iterator[Payload]:
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        _check_size(line)
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError) as error:
            if partial_end and number == len(lines) > 1 and not data.endswith(b"\n"):
                return
            raise PayloadError(f"line {number}: not JSON: {error}") from error
        yield _json_payload(tree)


def _json_payload(tree: object) -> Payload:
    message = ExportProfilesServiceRequest()
    notes: list[Note] = []

    def note(rule: str, where: str, text: str) -> None:
        if len(notes) < MAX_NOTES:
            notes.append(Note(rule, where, text))

    fill_message(message, tree, note)
    return Payload(message, tuple(notes))
