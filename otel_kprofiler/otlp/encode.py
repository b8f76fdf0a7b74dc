"""Encodes windows as OTLP requests within a size limit.

A window is encoded as one request. If the request is too large, it is discarded, and the samples
are encoded again in several requests, each with as many samples as are estimated to fit. A
request's dictionary contains only the values that the request uses.
"""

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    AttributeForm,
    Attributes,
    AttributeValue,
    Batch,
    Form,
    Profile,
    ProfileKind,
    ProfileSamples,
    Resource,
    SampleCounts,
    Stack,
    UnnamedFrames,
    WaitTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp.account import account_attributes
from otel_kprofiler.otlp.conventions import SCHEMA_URL
from otel_kprofiler.otlp.dictionary import Dictionary
from otel_kprofiler.otlp.json_form import JsonWriter
from otel_kprofiler.otlp.order import intern_in_order
from otel_kprofiler.otlp.pause import go_on
from otel_kprofiler.otlp.protobuf import ProtobufWriter
from otel_kprofiler.otlp.scope import Scope
from otel_kprofiler.otlp.wait_attributes import total_attributes
from otel_kprofiler.otlp.writer import Envelope, ProfileTypes, Writer
from otel_kprofiler.speedups import encode_samples

_WRITERS: Final[dict[Form, Writer]] = {Form.PROTOBUF: ProtobufWriter(), Form.JSON: JsonWriter()}

_ID_PREFIX_BYTES: Final = 12

_MARGIN_SHARE: Final = 256
"""When a window is split, 1/256 of the size limit is reserved, because the computed
sizes are lower bounds."""
_MORE_SHARE: Final = 8
"""If only some of the samples fit in a request, the next attempt uses 1/8 more samples than fit. If
all samples fit, the number of samples is doubled."""

_LEFT_SAMPLES: Final = 16
"""Number of samples that are encoded in Python after two in sequence that the C version leaves."""


class Encoded(NamedTuple):
    """An encoded window.

    ``too_large`` counts the samples, by kind, omitted because each exceeds the size limit.
    """

    batches: tuple[Batch, ...]
    too_large: Mapping[str, int]


class _Options(NamedTuple):
    window: Window
    writer: Writer
    scope: Scope
    attribute_form: AttributeForm
    unnamed_frames: UnnamedFrames
    max_bytes: int | None
    new_id: Callable[[int], bytes]
    accounts: Mapping[ProfileKind, Attributes]
    pause: Callable[[], None]


class _Owner(NamedTuple):
    """A Resource compared by value. Attributes are sorted, so equal Resources encode alike."""

    attributes: tuple[tuple[str, AttributeValue], ...]
    types: tuple[type, ...]
    """The types of the attribute values, which are also compared because ``1 == True``."""
    schema_url: str


class _Group(NamedTuple):
    owner: _Owner
    profile: Profile
    waits: WaitTotals | None


_Unit = tuple[_Group, WindowSample]
_NOTHING: Final = WindowSample(Stack(), 0, "", 0, None, (), (0,))
"""Placeholder sample for profiles with only wait totals, because Collectors drop empty profiles."""


def encode_window(
    window: Window,
    *,
    scope: Scope | None = None,
    form: Form = Form.PROTOBUF,
    max_bytes: int | None = None,
    attributes: AttributeForm = AttributeForm.INLINE,
    unnamed_frames: UnnamedFrames = UnnamedFrames.ADDRESSES,
    new_id: Callable[[int], bytes] = os.urandom,
    pause: Callable[[], None] | None = None,
) -> Encoded:
    """Encode a window as ``ExportProfilesServiceRequest`` messages.

    Every timestamp in the window is either in exactly one batch or counted in ``too_large``. If the
    window has neither samples nor wait totals, the result is one batch with the sample and loss
    counts (the account) of each sample kind. Kinds without a Resource or sample counts are omitted;
    if no kind remains, there is no batch. The same input yields the same bytes, apart from profile
    ids. Thread-safe.

    Args:
        window: window to encode, which must not change during the call.
        scope: the instrumentation scope; this package by default.
        form: protobuf, or JSON as specified by OTLP.
        max_bytes: maximum size of a batch's uncompressed payload; None for no limit.
        attributes: how resource and scope attributes are written. Collectors up to v0.162,
            Pyroscope and Parca show string references as empty strings.
        unnamed_frames: how frames without a function name are written. Pyroscope drops frames that
            have only addresses.
        new_id: returns the given number of random bytes. A profile id is 12 random bytes per batch,
            followed by the profile's number in the batch, starting at 1.
        pause: called frequently, to allow other threads to run.
    """
    options = _Options(
        window=window,
        writer=_WRITERS[form],
        scope=scope or Scope(),
        attribute_form=attributes,
        unnamed_frames=unnamed_frames,
        max_bytes=max_bytes,
        new_id=new_id,
        accounts={profile.kind: account_attributes(profile) for profile in window.profiles},
        pause=pause or go_on,
    )
    units = _units(options)
    if not units:
        return Encoded(tuple(_encode_account(options)), {})
    batch, _ = _encode(options, units)
    return Encoded((batch,), {}) if batch else _split(options, units)


def encode_empty(form: Form) -> bytes:
    """Encode a request without profiles, but with the zero entries that some receivers require."""
    writer = _WRITERS[form]
    return writer.request((), Dictionary(writer, AttributeForm.INLINE).tables.entries)


def _owner(resource: Resource) -> _Owner:
    attributes = tuple(sorted(resource.attributes.items()))
    types = tuple([type(value) for _, value in attributes])
    return _Owner(attributes, types, resource.schema_url or SCHEMA_URL)


def _encode_account(options: _Options) -> Iterator[Batch]:
    """Yields at most one request, with the sample counts of all kinds that have a Resource.

    Each profile contains one sample with value 0, because Collectors drop requests without samples.
    """
    writer, window = options.writer, options.window
    counted = [
        profile
        for profile in window.profiles
        if profile.resources and options.accounts[profile.kind]
    ]
    if not counted:
        return
    dictionary = Dictionary(writer, options.attribute_form, options.unnamed_frames)
    envelopes = _envelopes(options, dictionary, counted)
    scope = _scope(options, dictionary)
    owner = _owner(counted[0].resources[0].resource)
    resource = writer.resource(dictionary.key_values(owner.attributes), owner.schema_url)
    sample = writer.sample(b"", b"", writer.values((0,)))
    id_prefix = options.new_id(_ID_PREFIX_BYTES)
    profiles = [
        writer.profile(
            envelopes[profile.kind],
            sample,
            id_prefix + number.to_bytes(4, "big"),
            dictionary.attributes(options.accounts[profile.kind]),
        )
        for number, profile in enumerate(counted, start=1)
    ]
    group = writer.group(resource, scope, b"".join(profiles))
    payload = writer.request([group], dictionary.tables.entries)
    counts = tuple(ProfileSamples(profile.kind.name, 0) for profile in counted)
    yield Batch(payload, writer.form, counts, window.start_unix_ns, window.end_unix_ns)


def _units(options: _Options) -> list[_Unit]:
    """Returns samples ordered by Resource, then by kind. Equal Resources are merged."""
    merged: dict[_Owner, list[_Unit]] = {}
    for profile in options.window.profiles:
        waits: dict[_Owner, WaitTotals | None] = {}
        by_owner: dict[_Owner, list[WindowSample]] = {}
        for resource, samples, totals in profile.resources:
            owner = _owner(resource)
            earlier = waits.get(owner)
            waits[owner] = earlier.plus(totals) if earlier and totals else earlier or totals
            waiting = by_owner.setdefault(owner, [])
            for sample in samples:
                if sample.timestamps_unix_ns:
                    waiting.append(sample)
                options.pause()
        for owner, waiting in by_owner.items():
            group = _Group(owner, profile, waits[owner])
            selected = waiting or ([_NOTHING] if group.waits else [])
            merged.setdefault(owner, []).extend([(group, sample) for sample in selected])
    return [unit for units in merged.values() for unit in units]


def _split(options: _Options, units: list[_Unit]) -> Encoded:
    """Encode samples as several requests. Split oversized samples by timestamp."""
    batches = []
    too_large = SampleCounts()
    position = 0
    step = len(units)
    while position < len(units):
        batch, count = _encode_first(options, units[position : position + step])
        position += count
        step = 2 * count if count == step else count + count // _MORE_SHARE + 1
        if batch is None:
            group, sample = unit = units[position - 1]
            batch, fitting = _encode_times(options, unit)
            if batch is None:
                too_large[group.profile.kind.name] += len(sample.timestamps_unix_ns)
                continue
            position -= 1
            units[position] = group, _cut(sample, fitting, None)
        batches.append(batch)
    return Encoded(tuple(batches), too_large)


def _encode_first(options: _Options, units: Sequence[_Unit]) -> tuple[Batch | None, int]:
    """Encode as many samples as fit in a request, and return the batch and the sample count.

    If even the first sample is too large, returns ``(None, 1)``.
    """
    count = len(units)
    # Until it is known how many samples fit, their locations cannot be ordered.
    batch, fitting = _encode(options, units, in_order=False)
    while batch is None and fitting:
        count = fitting
        batch, fitting = _encode(options, units[:count])
    return batch, count


def _encode_times(options: _Options, unit: _Unit) -> tuple[Batch | None, int]:
    group, sample = unit

    def encode(count: int) -> Batch | None:
        return _encode(options, [(group, _cut(sample, 0, count))])[0]

    counts = range(1, len(sample.timestamps_unix_ns))
    count = bisect_left(counts, True, key=lambda count: encode(count) is None)
    return encode(count) if count else None, count


def _cut(sample: WindowSample, start: int, stop: int | None) -> WindowSample:
    return sample._replace(
        timestamps_unix_ns=sample.timestamps_unix_ns[start:stop], values=sample.values[start:stop]
    )


def _encode(
    options: _Options, units: Sequence[_Unit], *, in_order: bool = True
) -> tuple[Batch | None, int]:
    """Returns ``(batch, 0)`` with all samples, or ``(None, count)`` with a smaller count to try.

    ``count`` is 0 if a single sample is too large.
    """
    writer, limit = options.writer, options.max_bytes
    dictionary = Dictionary(writer, options.attribute_form, options.unnamed_frames)
    tables = dictionary.tables
    envelopes = _envelopes(options, dictionary, [group.profile for group, _ in units])
    scope = _scope(options, dictionary)
    dictionary.key_values(units[0][0].owner.attributes)  # all resources share most attributes
    if in_order:
        intern_in_order(dictionary, [sample.stack for _, sample in units], options.pause)
    id_prefix = options.new_id(_ID_PREFIX_BYTES)
    # The first profile of each kind contains the sample and loss counts for that kind.
    accounts = {kind: options.accounts[kind] for kind in envelopes}
    for account in accounts.values():
        dictionary.attributes(account)
    # In OTLP, values of 1 may be omitted only if all samples of the profile omit their values.
    with_values = {group.profile.kind for group, sample in units if sample.values}
    profiles: list[tuple[Envelope, bytes]] = []  # with their resources
    counts: list[ProfileSamples] = []
    sizes: list[int] = []  # lower bounds on the request's size after each sample
    complete_size = 0
    owner = None
    for group, units_of_group in groupby(units, itemgetter(0)):
        if group.owner != owner:
            owner = group.owner
            resource = writer.resource(dictionary.key_values(owner.attributes), owner.schema_url)
            complete_size += len(resource[0]) + len(resource[1])
        kind = group.profile.kind
        written = _write_samples(
            options, dictionary, [sample for _, sample in units_of_group],
            has_values=kind in with_values, size=complete_size, sizes=sizes,
        )  # fmt: skip
        if limit is not None and sizes[-1] > limit:
            return None, _fitting(sizes, limit, len(units))
        body, count = written
        counts.append(ProfileSamples(kind.name, count))
        profile_id = id_prefix + len(counts).to_bytes(4, "big")
        attributes = {**accounts.pop(kind, {}), **total_attributes(group.waits)}
        indices = dictionary.attributes(attributes)
        profile = writer.profile(envelopes[kind], body, profile_id, indices)
        profiles.append((resource, profile))
        complete_size += len(profile)
    groups = [
        writer.group(resource, scope, b"".join([profile for _, profile in of_resource]))
        for resource, of_resource in groupby(profiles, itemgetter(0))
    ]
    payload = writer.request(groups, tables.entries)
    if limit is not None and len(payload) > limit:
        return None, _fitting(sizes, limit - (len(payload) - sizes[-1]), len(units))
    start, end = options.window.start_unix_ns, options.window.end_unix_ns
    return Batch(payload, writer.form, tuple(counts), start, end), 0


def _write_samples(
    options: _Options,
    dictionary: Dictionary,
    units: Sequence[WindowSample],
    *,
    has_values: bool,
    size: int,
    sizes: list[int],
) -> tuple[bytes, int]:
    """Encode a profile's samples, and return the bytes and the number of samples.

    The result is empty if the limit is exceeded. ``size`` is a lower bound on the preceding
    profiles' size. For each sample, append a lower bound on the request's size so far to ``sizes``.
    """
    writer, limit, tables = options.writer, options.max_bytes, dictionary.tables
    samples: dict[bytes, bytes] = {}
    values: dict[bytes, bytes] = {}
    is_simple = writer.form is Form.PROTOBUF and not has_values
    bound = sys.maxsize if limit is None else min(limit, sys.maxsize)
    count = at = resumed = 0
    while at < len(units):
        if is_simple and at >= resumed:
            start = at
            at, size, added = dictionary.add_samples(
                units, at, samples, sizes, size=size, limit=bound
            )
            count += added
            if at == start:
                resumed = at + _LEFT_SAMPLES
            if sizes and sizes[-1] > bound:
                return b"", 0
            if at == len(units):
                break
        sample = units[at]  # left by the C version
        at += 1
        head = dictionary.sample_head(sample) if sample is not _NOTHING else b""
        times = writer.timestamps(sample.timestamps_unix_ns)
        size += len(times)
        earlier = samples.get(head)
        if earlier is None:
            size += len(head) + writer.sample_bytes
            samples[head] = times
        else:
            samples[head] = earlier + times
        if has_values:
            encoded = writer.values(sample.values or [1] * len(sample.timestamps_unix_ns))
            size += len(encoded)
            values[head] = values.get(head, b"") + encoded
        count += len(sample.timestamps_unix_ns)
        sizes.append(size + tables.size)
        if limit is not None and sizes[-1] > limit:
            return b"", 0
        options.pause()
    if is_simple and encode_samples:
        return encode_samples(samples), count
    written = []
    for head, times in samples.items():
        written.append(writer.sample(head, times, values[head] if has_values else b""))
        options.pause()
    return b"".join(written), count


def _fitting(sizes: Sequence[int], limit: int, count: int) -> int:
    """Returns the number of samples to try next, after ``count`` samples proved too large."""
    fitting = bisect_right(sizes, limit - limit // _MARGIN_SHARE)
    return min(max(fitting, 1), count - 1)


def _envelopes(
    options: _Options, dictionary: Dictionary, profiles: Iterable[Profile]
) -> dict[ProfileKind, Envelope]:
    string, envelopes = dictionary.string, {}
    for profile in dict.fromkeys(profiles):
        kind = profile.kind
        periodic = kind.period_type and profile.period_ns > 0
        types = ProfileTypes(
            string(kind.sample_type),
            string(kind.sample_unit),
            string(kind.period_type) if periodic else b"",
            string(kind.period_unit) if periodic else b"",
        )
        envelopes[kind] = options.writer.profile_envelope(options.window, types, profile.period_ns)
    return envelopes


def _scope(options: _Options, dictionary: Dictionary) -> Envelope:
    scope = options.scope
    attributes = dictionary.key_values(sorted(scope.attributes.items()))
    return options.writer.scope(scope.name, scope.version, attributes, scope.schema_url)
