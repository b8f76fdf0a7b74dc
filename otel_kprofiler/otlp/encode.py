"""Windows to OTLP requests, none larger than the limit.

A window is encoded as one request. If that turns out to be too large it is thrown away, and as
many samples as seem to fit are encoded again, then the rest. Each request has a dictionary of
its own that holds what its samples use and nothing else.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import invert, itemgetter
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    AttributeForm,
    Attributes,
    AttributeValue,
    Batch,
    Form,
    Frame,
    Resource,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp.account import account_attributes
from otel_kprofiler.otlp.conventions import SCHEMA_URL
from otel_kprofiler.otlp.dictionary import Dictionary
from otel_kprofiler.otlp.json_form import JsonWriter
from otel_kprofiler.otlp.protobuf import ProtobufWriter
from otel_kprofiler.otlp.writer import Envelope, Header, ProfileTypes, Writer
from otel_kprofiler.version import __version__

_WRITERS: Final[dict[Form, Writer]] = {Form.PROTOBUF: ProtobufWriter(), Form.JSON: JsonWriter()}

_ONE_BYTE_INDICES: Final = 127
"""Entries of a table, besides the zero entry, whose index is one byte long."""

_STACKS_COUNTED: Final = 256
"""Stacks of so many samples, or up to twice as many, tell what is frequent."""
_STACKS_AT_ONCE: Final = 16
"""So many are counted before other threads may run."""

_ID_PREFIX_BYTES: Final = 12

_MARGIN_SHARE: Final = 256
"""When samples are cut off, limit / 256 is kept free for what is not counted before the end."""
_MORE_SHARE: Final = 8
"""After one part the next is tried with an eighth more samples, to cut off as few as possible."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What produced the profiles (an OpenTelemetry InstrumentationScope)."""

    name: str = "otel_kprofiler"
    version: str = __version__
    attributes: Attributes = field(default_factory=dict)
    schema_url: str = SCHEMA_URL


class Encoded(NamedTuple):
    """A window as requests.

    Attributes:
        batches: the requests, in the order of the samples; empty if there were no samples.
        too_large: samples that alone exceed the size limit and are in no batch.
    """

    batches: tuple[Batch, ...]
    too_large: int


@dataclass(frozen=True, slots=True)
class _Options:
    window: Window
    writer: Writer
    scope: Scope
    attribute_form: AttributeForm
    max_bytes: int | None
    new_id: Callable[[int], bytes]
    account: Attributes
    pause: Callable[[], None]


class _Owner(NamedTuple):
    """A Resource by value: attributes are sorted by key, so that equal ones give equal bytes."""

    attributes: tuple[tuple[str, AttributeValue], ...]
    types: tuple[type, ...]
    """Of the values, as 1 equals True."""
    schema_url: str


_Unit = tuple[_Owner, WindowSample]


def encode_window(
    window: Window,
    *,
    scope: Scope | None = None,
    form: Form = Form.PROTOBUF,
    max_bytes: int | None = None,
    attributes: AttributeForm = AttributeForm.INLINE,
    new_id: Callable[[int], bytes] = os.urandom,
    pause: Callable[[], None] | None = None,
) -> Encoded:
    """Encode a window as ``ExportProfilesServiceRequest`` messages.

    Every timestamp of the window is in exactly one batch or counted in ``too_large``. A window
    with a Resource that has no samples becomes one batch with the account alone. Equal input
    gives equal bytes, apart from profile ids. Thread-safe.

    Args:
        window: what to encode; must not be changed meanwhile.
        scope: the instrumentation scope; by default this package.
        form: protobuf, or JSON by OTLP's mapping.
        max_bytes: upper limit of a batch's payload before compression; None for no limit.
        attributes: how resource and scope attributes are written. By reference they are empty
            for most receivers: Collectors up to v0.162, Pyroscope and Parca.
        new_id: gives so many random bytes. A profile id is 12 of them, drawn anew for each
            batch, and the profile's number in it from 1 on.
        pause: called again and again meanwhile, to let other threads run.
    """
    options = _Options(
        window=window,
        writer=_WRITERS[form],
        scope=scope or Scope(),
        attribute_form=attributes,
        max_bytes=max_bytes,
        new_id=new_id,
        account=account_attributes(window),
        pause=pause or _go_on,
    )
    units = _units(options)
    if not units:
        return Encoded(tuple(_encode_account(options)), 0)
    batch, _ = _encode(options, units)
    return Encoded((batch,), 0) if batch else _split(options, units)


def _go_on() -> None:
    """Pauses nothing."""


def _owner(resource: Resource) -> _Owner:
    attributes = tuple(sorted(resource.attributes.items()))
    types = tuple([type(value) for _, value in attributes])
    return _Owner(attributes, types, resource.schema_url or SCHEMA_URL)


def _encode_account(options: _Options) -> Iterator[Batch]:
    """A request for the first Resource, if there is an account to be told.

    It has one sample of value 0: Collectors take a request without samples, and drop it.
    """
    writer, window = options.writer, options.window
    if not window.resources or not options.account:
        return
    dictionary = Dictionary(writer, options.attribute_form)
    envelope = _envelope(options, dictionary)
    owner = _owner(window.resources[0].resource)
    resource = writer.resource(dictionary.key_values(owner.attributes), owner.schema_url)
    sample = writer.sample(b"", b"", writer.values((0,)))
    profile_id = options.new_id(_ID_PREFIX_BYTES) + (1).to_bytes(4, "big")
    account = dictionary.attributes(options.account)
    group = writer.group(envelope, resource, sample, profile_id, account)
    payload = writer.request([group], dictionary.tables.entries)
    yield Batch(payload, writer.form, (0,), window.start_unix_ns, window.end_unix_ns)


def _units(options: _Options) -> list[_Unit]:
    """Samples by resource; resources of equal value are one."""
    merged: dict[_Owner, list[_Unit]] = {}
    for resource, samples in options.window.resources:
        units = merged.setdefault(owner := _owner(resource), [])
        for sample in samples:
            if sample.timestamps_unix_ns:
                units.append((owner, sample))
            options.pause()
    return [unit for units in merged.values() for unit in units]


def _split(options: _Options, units: list[_Unit]) -> Encoded:
    """Several requests; timestamps of one sample are split where it is too large by itself."""
    batches = []
    too_large = position = 0
    step = len(units)
    while position < len(units):
        batch, count = _encode_first(options, units[position : position + step])
        position += count
        step = 2 * count if count == step else count + count // _MORE_SHARE + 1
        if batch is None:
            owner, sample = units[position - 1]
            batch, fitting = _encode_times(options, owner, sample)
            if batch is None:
                too_large += len(sample.timestamps_unix_ns)
                continue
            position -= 1
            units[position] = owner, _cut(sample, fitting, None)
        batches.append(batch)
    return Encoded(tuple(batches), too_large)


def _encode_first(options: _Options, units: Sequence[_Unit]) -> tuple[Batch | None, int]:
    """A request with as many of the samples as fit, and how many these are.

    None and 1 if the first is too large by itself.
    """
    count = len(units)
    # Not all of these will be in it, so nothing is known of what will be frequent.
    batch, fitting = _encode(options, units, frequent_first=False)
    while batch is None and fitting:
        count = fitting
        batch, fitting = _encode(options, units[:count])
    return batch, count


def _encode_times(
    options: _Options, owner: _Owner, sample: WindowSample
) -> tuple[Batch | None, int]:
    """A request with as many of a sample's timestamps as fit, and how many these are."""

    def encode(count: int) -> Batch | None:
        return _encode(options, [(owner, _cut(sample, 0, count))])[0]

    counts = range(1, len(sample.timestamps_unix_ns))
    count = bisect_left(counts, True, key=lambda count: encode(count) is None)
    return encode(count) if count else None, count


def _cut(sample: WindowSample, start: int, stop: int | None) -> WindowSample:
    """The sample with some of its timestamps and their values."""
    return sample._replace(
        timestamps_unix_ns=sample.timestamps_unix_ns[start:stop], values=sample.values[start:stop]
    )


def _encode(
    options: _Options, units: Sequence[_Unit], *, frequent_first: bool = True
) -> tuple[Batch | None, int]:
    """A request with all of these samples.

    If it is too large there is None, and how many of the samples to try instead, 0 instead of one.
    """
    writer, limit = options.writer, options.max_bytes
    dictionary = Dictionary(writer, options.attribute_form)
    tables = dictionary.tables
    envelope = _envelope(options, dictionary)
    dictionary.key_values(units[0][0].attributes)  # most of them are those of all resources
    if frequent_first:
        _intern_frequent(options, dictionary, units)
    id_prefix = options.new_id(_ID_PREFIX_BYTES)
    account = dictionary.attributes(options.account)  # of the first profile
    groups: list[bytes] = []
    counts = []
    sizes: list[int] = []  # bytes up to each sample, at least
    groups_size = 0
    # All samples of a profile have one shape: values for all, or none where each would be 1.
    has_values = any(sample.values for _, sample in units)
    for owner, units_of_owner in groupby(units, itemgetter(0)):
        resource = writer.resource(dictionary.key_values(owner.attributes), owner.schema_url)
        samples: dict[bytes, bytes] = {}
        values: dict[bytes, bytes] = {}
        count = samples_size = 0
        for _, sample in units_of_owner:
            head = writer.sample_head(
                dictionary.stack(sample.stack),
                dictionary.sample_attributes(sample),
                dictionary.link(sample.link) if sample.link else b"",
            )
            times = writer.timestamps(sample.timestamps_unix_ns)
            samples_size += len(times)
            earlier = samples.get(head)
            if earlier is None:
                samples_size += len(head) + writer.sample_bytes
                samples[head] = times
            else:
                samples[head] = earlier + times
            if has_values:
                own = writer.values(sample.values or [1] * len(sample.timestamps_unix_ns))
                samples_size += len(own)
                values[head] = values.get(head, b"") + own
            count += len(sample.timestamps_unix_ns)
            sizes.append(groups_size + samples_size + tables.size)
            if limit is not None and sizes[-1] > limit:
                return None, _fitting(sizes, limit, len(units))
            options.pause()
        written = []
        for head, times in samples.items():
            written.append(writer.sample(head, times, values.get(head, b"")))
            options.pause()
        profile_id = id_prefix + (len(groups) + 1).to_bytes(4, "big")
        groups.append(writer.group(envelope, resource, b"".join(written), profile_id, account))
        groups_size += len(groups[-1])
        counts.append(count)
        account = b""
    payload = writer.request(groups, tables.entries)
    if limit is not None and len(payload) > limit:
        return None, _fitting(sizes, limit - (len(payload) - sizes[-1]), len(units))
    interval = options.window.start_unix_ns, options.window.end_unix_ns
    return Batch(payload, writer.form, tuple(counts), *interval), 0


def _fitting(sizes: Sequence[int], limit: int, count: int) -> int:
    """How many of so many samples to try next, as all are too large."""
    found = bisect_right(sizes, limit - limit // _MARGIN_SHARE)
    return min(max(found, 1), count - 1)


def _envelope(options: _Options, dictionary: Dictionary) -> Envelope:
    string, window, scope = dictionary.string, options.window, options.scope
    kind = window.kind
    periodic = kind.period_type and window.period_ns > 0
    types = ProfileTypes(
        string(kind.sample_type),
        string(kind.sample_unit),
        string(kind.period_type) if periodic else b"",
        string(kind.period_unit) if periodic else b"",
    )
    attributes = dictionary.key_values(sorted(scope.attributes.items()))
    return options.writer.envelope(
        Header(window, types, scope.name, scope.version, attributes, scope.schema_url)
    )


def _intern_frequent(options: _Options, dictionary: Dictionary, units: Sequence[_Unit]) -> None:
    """Give short indices to the frames and addresses that most stacks hold, if there are more."""
    some = units[:: max(1, len(units) // _STACKS_COUNTED)]
    stacks = list({id(sample.stack): sample.stack for _, sample in some}.values())
    frames: dict[int, Frame] = {}
    uses: Counter[int] = Counter()
    for start in range(0, len(stacks), _STACKS_AT_ONCE):
        options.pause()
        counted = stacks[start : start + _STACKS_AT_ONCE]
        leading = [frame for stack in counted for frame in stack.leading]
        frames.update(zip(map(id, leading), leading, strict=True))
        uses.update(map(id, leading))
        addresses = chain.from_iterable([stack.user_addresses for stack in counted])
        uses.update(map(invert, addresses))  # below 0, as ids never are
    if len(uses) <= _ONE_BYTE_INDICES:
        return
    for key in sorted(uses, key=uses.__getitem__, reverse=True)[:_ONE_BYTE_INDICES]:
        if key >= 0:
            dictionary.frame(frames[key])
        else:
            dictionary.user_address(invert(key))
        options.pause()
