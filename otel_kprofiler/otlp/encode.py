"""Windows to OTLP requests, split by exact size.

Samples are added one by one to a part; what a sample needs in the dictionary is interned on
the way, and taken out again when the sample turns out not to fit. Each part is a request of
its own with a dictionary that holds what its samples use and nothing else.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import invert
from typing import Final, NamedTuple

from otel_kprofiler.model import (
    Attributes,
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
from otel_kprofiler.otlp.writer import Around, Header, ProfileTypes, Writer
from otel_kprofiler.version import __version__

_WRITERS: Final[dict[Form, Writer]] = {Form.PROTOBUF: ProtobufWriter(), Form.JSON: JsonWriter()}

_ONE_BYTE_INDICES: Final = 127
"""Entries of a table, besides the zero entry, whose index is one byte long."""

_STACKS_COUNTED: Final = 256
"""So many stacks, or twice as many, tell which frames are frequent."""

_ID_PREFIX_BYTES: Final = 12

_LENGTHS_BYTES: Final = 64
"""More than the lengths of messages inside of each other grow by when these are filled."""


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
    keys_by_reference: bool
    max_bytes: int | None
    new_id: Callable[[int], bytes]
    account: Attributes
    pause: Callable[[], None]


_Unit = tuple[Resource, WindowSample]


class _Group:
    """The ResourceProfiles that is being filled: timestamps by identity of the sample.

    It takes at most ``around_size`` bytes beside its samples.
    """

    def __init__(self, resource: Resource, around: Around, around_size: int) -> None:
        self.resource = resource
        self.around = around
        self.around_size = around_size
        self.samples: dict[bytes, bytes] = {}
        self.size = 0
        self.count = 0


class _Part:
    """One request under construction, never larger than the limit.

    Given all units that it shall hold, it hands out short indices to the frequent frames; if
    it then cannot hold them all, some entries are without use and it must be thrown away.
    """

    def __init__(self, options: _Options, all_units: Sequence[_Unit] = ()) -> None:
        self._options = options
        self._writer = options.writer
        self._dictionary = Dictionary(options.writer, keys_by_reference=options.keys_by_reference)
        self._finished: list[bytes] = []
        self._finished_size = 0
        self._counts: list[int] = []
        self._group: _Group | None = None
        self._id_prefix = b""
        if all_units:
            self._around(all_units[0][0])  # strings that every resource refers to come first
            for place in self._frequent(all_units):
                options.pause()
                if isinstance(place, Frame):
                    self._dictionary.frame(place)
                else:
                    self._dictionary.user_address(place)

    @property
    def empty(self) -> bool:
        return self._group is None

    def add(self, resource: Resource, sample: WindowSample, times: Sequence[int]) -> bool:
        """Add timestamps of a sample; False, and nothing has changed, if they do not fit."""
        writer, dictionary = self._writer, self._dictionary
        self._options.pause()
        dictionary.begin()
        group = self._group
        closed_size = self._finished_size
        if group is None or group.resource is not resource:
            if group is not None:
                closed_size += writer.group_size(group.around, group.size)
            around = self._around(resource)
            group = _Group(resource, around, writer.group_size(around, 0) + _LENGTHS_BYTES)
        head = writer.sample_head(
            dictionary.stack(sample.stack), dictionary.thread(sample), dictionary.link(sample.link)
        )
        timestamps = writer.timestamps(times)
        size = group.size
        earlier = group.samples.get(head)
        if earlier is not None:
            size -= writer.sample_size(len(head), len(earlier))
            timestamps = earlier + timestamps
        size += writer.sample_size(len(head), len(timestamps))
        limit = self._options.max_bytes
        bound = closed_size + group.around_size + size + dictionary.size
        if limit is not None and bound > limit:  # only then is the exact size of interest
            groups = closed_size + writer.group_size(group.around, size)
            if writer.request_size(groups, dictionary.size) > limit:
                dictionary.rollback()
                return False
        if group is not self._group:
            self._finish_group()
            self._group = group
        group.samples[head] = timestamps
        group.size = size
        group.count += len(times)
        return True

    def _around(self, resource: Resource) -> Around:
        options, string = self._options, self._dictionary.string
        kind, scope = options.window.kind, options.scope
        periodic = kind.period_type and options.window.period_ns > 0
        types = ProfileTypes(
            string(kind.sample_type),
            string(kind.sample_unit),
            string(kind.period_type) if periodic else b"",
            string(kind.period_unit) if periodic else b"",
        )
        if not self._id_prefix:
            self._id_prefix = options.new_id(_ID_PREFIX_BYTES)
        number = len(self._counts) + (self._group is not None) + 1
        header = Header(
            window=options.window,
            types=types,
            profile_id=self._id_prefix + number.to_bytes(4, "big"),
            scope_name=scope.name,
            scope_version=scope.version,
            scope_attributes=self._dictionary.key_values(scope.attributes),
            scope_schema_url=scope.schema_url,
            resource_attributes=self._dictionary.key_values(resource.attributes),
            resource_schema_url=resource.schema_url or SCHEMA_URL,
            attributes=self._dictionary.attributes(options.account) if number == 1 else b"",
        )
        return self._writer.around(header)

    def _frequent(self, units: Sequence[_Unit]) -> list[Frame | int]:
        """What most stacks hold, frames or user addresses, if it is more than short indices."""
        stacks = list({id(sample.stack): sample.stack for _, sample in units}.values())
        frames: dict[int, Frame] = {}
        uses: Counter[int] = Counter()
        for stack in stacks[:: max(1, len(stacks) // _STACKS_COUNTED)]:
            self._options.pause()
            frames.update(zip(map(id, stack.leading), stack.leading, strict=True))
            uses.update(map(id, stack.leading))
            uses.update(map(invert, stack.user_addresses))  # below 0, as ids never are
        if len(uses) <= _ONE_BYTE_INDICES:
            return []
        return [
            frames[key] if key >= 0 else invert(key)
            for key, _ in uses.most_common(_ONE_BYTE_INDICES)
        ]

    def _finish_group(self) -> None:
        group = self._group
        if group is None:
            return
        samples = []
        for item in group.samples.items():
            samples.append(self._writer.sample(*item))
            self._options.pause()
        self._finished.append(self._writer.group(group.around, samples))
        self._finished_size += len(self._finished[-1])
        self._counts.append(group.count)

    def batch(self) -> Batch:
        self._finish_group()
        window = self._options.window
        return Batch(
            payload=self._writer.request(self._finished, self._dictionary.tables),
            form=self._writer.form,
            profile_samples=tuple(self._counts),
            start_unix_ns=window.start_unix_ns,
            end_unix_ns=window.end_unix_ns,
        )


def encode_window(
    window: Window,
    *,
    scope: Scope | None = None,
    form: Form = Form.PROTOBUF,
    max_bytes: int | None = None,
    keys_by_reference: bool = True,
    new_id: Callable[[int], bytes] = os.urandom,
    pause: Callable[[], None] | None = None,
) -> Encoded:
    """Encode a window as ``ExportProfilesServiceRequest`` messages.

    Every timestamp of the window is in exactly one batch or counted in ``too_large``. Equal
    input gives equal bytes, apart from profile ids. Thread-safe.

    Args:
        window: what to encode; must not be changed meanwhile.
        scope: the instrumentation scope; by default this package.
        form: protobuf, or JSON by OTLP's mapping.
        max_bytes: upper limit of a batch's payload before compression; None for no limit.
        keys_by_reference: refer to the string table for keys and string values of resource
            and scope attributes. Some Collectors blank keys that are written inline.
        new_id: gives so many random bytes. A profile id is 12 of them, drawn once for each
            batch, and the profile's number in it from 1 on.
        pause: called again and again meanwhile, to let other threads run.
    """
    options = _Options(
        window=window,
        writer=_WRITERS[form],
        scope=scope or Scope(),
        keys_by_reference=keys_by_reference,
        max_bytes=max_bytes,
        new_id=new_id,
        account=account_attributes(window),
        pause=pause or _go_on,
    )
    units = _units(options)
    if not units:
        return Encoded((), 0)
    part = _Part(options, units)
    if all(part.add(resource, sample, sample.timestamps_unix_ns) for resource, sample in units):
        return Encoded((part.batch(),), 0)
    return _split(options, units)


def _go_on() -> None:
    """Pauses nothing."""


def _units(options: _Options) -> list[_Unit]:
    """Samples by resource; resources of equal value are one."""
    merged: dict[object, list[_Unit]] = {}
    for resource, samples in options.window.resources:
        attributes = resource.attributes
        values = ((key, type(attributes[key]), attributes[key]) for key in sorted(attributes))
        units = merged.setdefault((resource.schema_url or SCHEMA_URL, *values), [])
        first = units[0][0] if units else resource
        for sample in samples:
            if sample.timestamps_unix_ns:
                units.append((first, sample))
            options.pause()
    return [unit for units in merged.values() for unit in units]


def _split(options: _Options, units: Sequence[_Unit]) -> Encoded:
    batches = []
    too_large = 0
    part = _Part(options)
    for resource, sample in units:
        times = sample.timestamps_unix_ns
        while times and not part.add(resource, sample, times):
            if not part.empty:
                batches.append(part.batch())
                part = _Part(options)
                continue
            count = _fitting(options, resource, sample, times)
            if not count:
                too_large += len(times)
                break
            part.add(resource, sample, times[:count])
            times = times[count:]
    if not part.empty:
        batches.append(part.batch())
    return Encoded(tuple(batches), too_large)


def _fitting(
    options: _Options, resource: Resource, sample: WindowSample, times: Sequence[int]
) -> int:
    """How many of the timestamps fit into a part of their own; not all of them do."""
    return bisect_left(
        range(1, len(times)),
        True,
        key=lambda count: not _Part(options).add(resource, sample, times[:count]),
    )
