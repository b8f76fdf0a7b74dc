"""Re-encodes messages from any producer in a form and size that the receiver accepts.

Resource and scope attributes that refer to the dictionary are written inline, because most
receivers do not resolve references. Messages that are small enough are otherwise unchanged. A
larger message is split into parts with fewer samples each, until each part is small enough. Each
part's dictionary contains only the values that the part uses.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import Batch, Form, ProfileSamples, SampleCounts
from otel_kprofiler.otlp.encode import Encoded
from otel_kprofiler.otlp.messages import ExportProfilesServiceRequest
from otel_kprofiler.otlp.payloads import parse_payloads
from otel_kprofiler.otlp.references import (
    STRINGS,
    check_indices,
    find_references,
    find_used,
    renumber_references,
)
from otel_kprofiler.otlp.shared_account import KindKey, kind_key, spread_accounts, thin_accounts

_KIND: Final = "samples"
"""Name of the kind under which re-encoded batches count all samples."""
_ID_BYTES: Final = 16
_FIRST_TIME: Final = 1 << 63
"""Added to timestamp positions in a sample, to distinguish them from sample positions."""
_MARGIN: Final = 1.1
"""Estimated ratio of the parts' total size to the request's size; parts repeat common entries."""


class _Place(NamedTuple):
    resource: int
    scope: int
    profile: int


class _Slice(NamedTuple):
    place: _Place
    start: int
    end: int


def encode_message(message: Any, form: Form, max_bytes: int | None) -> Encoded:
    """Encode an ``ExportProfilesServiceRequest`` as requests for a receiver.

    The message may be modified. ``max_bytes`` is the maximum size of an uncompressed request;
    None for no limit. Samples that individually exceed the limit are dropped and counted. Raises
    ``PayloadError`` if an index is out of range.
    """
    if any(
        table == STRINGS for holder in _holders(message) for table, _ in find_references(holder)
    ):
        check_indices(message)
        strings = message.dictionary.string_table
        for holder in _holders(message):
            _resolve_attributes(holder.attributes, strings)
        message = _take(message, _slices(message))
    payload = _serialize(message, form)
    if max_bytes is None or len(payload) <= max_bytes:
        return Encoded((_make_batch(message, payload, form),), {})
    check_indices(message)
    too_large = SampleCounts()
    return Encoded(tuple(_split(message, form, max_bytes, too_large)), too_large)


def divide_batch(batch: Batch, max_bytes: int) -> tuple[Batch, ...]:
    """Divide a request into at least two smaller requests of the same form and kinds.

    Every sample is in exactly one part. Each part repeats the request's sample and loss counts.
    Some parts may exceed ``max_bytes``. Returns the parts in order, or an empty tuple if the
    request has a single timestamp, cannot be parsed, or does not match the batch's sample counts.
    """
    try:
        message = _parse(batch)
        check_indices(message)
    except (DecodeError, PayloadError):
        return ()
    profiles = [profile for _, profile in _profiles(message)]
    strings = message.dictionary.string_table
    kinds = {
        kind_key(profile, strings): counted.kind
        for profile, counted in zip(profiles, batch.profiles, strict=False)
    }
    count = max(2, math.ceil(len(batch.payload) * _MARGIN / max_bytes))
    parts = tuple(
        replace(
            _make_batch(part, _serialize(part, batch.form), batch.form, kinds),
            start_unix_ns=batch.start_unix_ns,
            end_unix_ns=batch.end_unix_ns,
        )
        for part in _divide(message, count)
    )
    # A payload from another producer may contain different counts; such a batch is not split.
    counts = sum((part.sample_counts for part in parts), SampleCounts())
    return parts if counts == batch.sample_counts else ()


def _parse(batch: Batch) -> Any:
    if batch.form is Form.PROTOBUF:
        return ExportProfilesServiceRequest.FromString(batch.payload)
    (payload,) = parse_payloads(batch.payload)
    return payload.message


def _serialize(message: Any, form: Form) -> bytes:
    if form is Form.PROTOBUF:
        payload: bytes = message.SerializeToString(deterministic=True)
        return payload
    tree = MessageToDict(message)
    for link in tree.get("dictionary", {}).get("linkTable", ()):
        _write_ids_hexadecimal(link, "traceId", "spanId")
    for resource in tree.get("resourceProfiles", ()):
        for scope in resource.get("scopeProfiles", ()):
            for profile in scope.get("profiles", ()):
                _write_ids_hexadecimal(profile, "profileId")
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def _write_ids_hexadecimal(node: dict[str, Any], *names: str) -> None:
    """Write ids in hexadecimal, as OTLP requires in JSON. Other byte fields remain in base64."""
    for name in names:
        if name in node:
            node[name] = base64.b64decode(node[name]).hex()


def _make_batch(
    message: Any, payload: bytes, form: Form, kinds: Mapping[KindKey, str] = MappingProxyType({})
) -> Batch:
    """Build a batch; profiles whose kind is not in ``kinds`` count as "samples"."""
    profiles = [profile for _, profile in _profiles(message)]
    strings = message.dictionary.string_table
    counts = [
        ProfileSamples(
            kinds.get(kind_key(profile, strings), _KIND), sum(map(_count, profile.samples))
        )
        for profile in profiles
    ]
    start = min((profile.time_unix_nano for profile in profiles), default=0)
    ends = (profile.time_unix_nano + profile.duration_nano for profile in profiles)
    return Batch(payload, form, tuple(counts), start, max(ends, default=0))


def _count(sample: Any) -> int:
    """Returns the number of samples in a ``Sample``; 0 if it only carries the profile's counts."""
    return len(sample.timestamps_unix_nano) or sum(value != 0 for value in sample.values)


def _profiles(message: Any) -> Iterator[tuple[_Place, Any]]:
    for number, resource in enumerate(message.resource_profiles):
        for second, scope in enumerate(resource.scope_profiles):
            for third, profile in enumerate(scope.profiles):
                yield _Place(number, second, third), profile


def _holders(message: Any) -> Iterator[Any]:
    for resource in message.resource_profiles:
        yield resource.resource
        for scope in resource.scope_profiles:
            yield scope.scope


def _resolve_attributes(attributes: Sequence[Any], strings: Sequence[str]) -> None:
    for attribute in attributes:
        if attribute.key_strindex:
            attribute.key = strings[attribute.key_strindex]
            attribute.ClearField("key_strindex")
        if attribute.HasField("value"):
            _resolve_value(attribute.value, strings)


def _resolve_value(value: Any, strings: Sequence[str]) -> None:
    kind = value.WhichOneof("value")
    if kind == "string_value_strindex":
        value.string_value = strings[value.string_value_strindex] if strings else ""
    elif kind == "array_value":
        for item in value.array_value.values:
            _resolve_value(item, strings)
    elif kind == "kvlist_value":
        _resolve_attributes(value.kvlist_value.values, strings)


def _slices(message: Any) -> list[_Slice]:
    return [_Slice(place, 0, len(profile.samples)) for place, profile in _profiles(message)]


def _split(message: Any, form: Form, max_bytes: int, too_large: SampleCounts) -> Iterator[Batch]:
    pending = [message]
    while pending:
        part = pending.pop()
        payload = _serialize(part, form)
        if len(payload) <= max_bytes:
            yield _make_batch(part, payload, form)
        elif parts := _divide(part, max(2, math.ceil(len(payload) * _MARGIN / max_bytes))):
            pending += reversed(parts)
        else:
            too_large[_KIND] += _make_batch(part, b"", form).sample_count


def _divide(message: Any, parts: int) -> list[Any]:
    """Divide a message into parts with about equal numbers of samples; empty if impossible."""
    spread_accounts(message)
    divided = _divide_samples(message, parts)
    for part in divided:
        thin_accounts(part)
    return divided


def _divide_samples(message: Any, parts: int) -> list[Any]:
    slices = _slices(message)
    count = sum(piece.end - piece.start for piece in slices)
    if count <= 1:
        return _halve_times(message)
    size = math.ceil(count / parts)
    divided: list[list[_Slice]] = [[]]
    room = size
    for place, start, end in slices:
        position = start
        while end - position > room:
            if room:
                divided[-1].append(_Slice(place, position, position + room))
            divided.append([])
            position, room = position + room, size
        divided[-1].append(_Slice(place, position, end))
        room -= end - position
    return [_take(message, some) for some in divided]


def _halve_times(message: Any) -> list[Any]:
    halves = []
    for index in range(2):
        half = _take(message, _slices(message))
        samples = [sample for _, profile in _profiles(half) for sample in profile.samples]
        count = len(samples[0].timestamps_unix_nano) if samples else 0
        if count <= 1:
            return []
        for values in (samples[0].timestamps_unix_nano, samples[0].values):
            if len(values) == count:
                values[:] = (values[: count // 2], values[count // 2 :])[index]
        if index:
            # Derive the second half's profile ids from its position.
            for _, profile in _profiles(half):
                if profile.profile_id:
                    profile.profile_id = _derive_id(profile.profile_id, _FIRST_TIME + count // 2)
        halves.append(half)
    return halves


def _derive_id(whole: bytes, start: int) -> bytes:
    """Derive an id for a part of a profile from the profile's id and the part's position."""
    return hashlib.blake2b(start.to_bytes(8, "big"), key=whole[:64], digest_size=_ID_BYTES).digest()


def _take(message: Any, slices: Sequence[_Slice]) -> Any:
    part = ExportProfilesServiceRequest()
    for number, of_resource in groupby(slices, lambda piece: piece.place.resource):
        resource = message.resource_profiles[number]
        new_resource = part.resource_profiles.add(schema_url=resource.schema_url)
        if resource.HasField("resource"):
            new_resource.resource.CopyFrom(resource.resource)
        for second, of_scope in groupby(of_resource, lambda piece: piece.place.scope):
            scope = resource.scope_profiles[second]
            new_scope = new_resource.scope_profiles.add(schema_url=scope.schema_url)
            if scope.HasField("scope"):
                new_scope.scope.CopyFrom(scope.scope)
            for place, start, end in of_scope:
                profile = scope.profiles[place.profile]
                new = new_scope.profiles.add()
                new.CopyFrom(profile)
                del new.samples[end:]
                del new.samples[:start]
                if start and new.profile_id:
                    new.profile_id = _derive_id(new.profile_id, start)
    _copy_dictionary(message.dictionary, part)
    return part


def _copy_dictionary(dictionary: Any, part: Any) -> None:
    used = find_used(part, dictionary)
    numbers = {
        table: {old: new for new, old in enumerate(sorted(indices))}
        for table, indices in used.items()
    }

    def renumber(table: str, index: int) -> int:
        return numbers[table][index]

    renumber_references(part, renumber)
    for table, indices in used.items():
        entries, new = getattr(dictionary, table), getattr(part.dictionary, table)
        if table == STRINGS:
            new.extend(entries[index] if entries else "" for index in sorted(indices))
            continue
        for index in sorted(indices):
            entry = new.add()
            if entries:
                entry.CopyFrom(entries[index])
                renumber_references(entry, renumber)
