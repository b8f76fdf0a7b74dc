"""Decodes OTLP profiles from any producer into windows.

Values that OTLP cannot represent are set to defaults, such as offset 0 for frames and base 0 for
modules. A kernel, user or Python stack without a status is complete, or not collected if empty.
"""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from otel_kprofiler.errors import PayloadError
from otel_kprofiler.model import (
    AttributeValue,
    Profile,
    Resource,
    ResourceSamples,
    WaitTotals,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp.account import parse_account
from otel_kprofiler.otlp.decode_tables import Identity, ProfileKey, SharedValues, Tables
from otel_kprofiler.otlp.payloads import (
    DamagedProfilesError,
    OnDamage,
    TruncatedError,
    parse_payloads,
    read_file,
)
from otel_kprofiler.otlp.references import outside_error
from otel_kprofiler.otlp.values import Values
from otel_kprofiler.otlp.wait_attributes import parse_totals

_ResourceKey = tuple[object, ...]
_ProfileSamples = dict[_ResourceKey, dict[Identity, "_Series"]]


def read_profiles(path: str) -> list[Window]:
    """Decode a file's windows from a bare message, length-prefixed messages, or JSON lines.

    A truncated last line or message is ignored. Raises ``PayloadError`` if the file does not
    contain OTLP profiles, and ``OSError`` if it cannot be read.
    """
    return decode_windows(read_file(path))


def _allow_truncated(error: PayloadError) -> None:
    if not isinstance(error, TruncatedError):
        raise error


def decode_windows(
    data: bytes | Iterable[bytes], *, on_damage: OnDamage = _allow_truncated
) -> list[Window]:
    """Decode serialized requests in any form, and merge the parts of each window.

    Profiles that a sender repeated in a later request, which have the same ``profile_id``, are
    decoded once.

    ``on_damage`` is called for each unreadable or truncated message. If ``on_damage`` returns, the
    readable part of the message is used. By default, only the last message may be truncated. Raises
    ``PayloadError`` if the data is not OTLP profiles, has a layout older than opentelemetry-proto
    1.43, or exceeds ``MAX_MESSAGE_BYTES`` or ``MAX_WRITTEN_CHARS``.
    """
    decoder = _Decoder()
    for piece in [data] if isinstance(data, bytes) else data:
        for payload in parse_payloads(piece, on_damage):
            try:
                decoder.add(payload.message)
            except PayloadError as error:
                on_damage(error)
    return decoder.windows()


def _identify(profile: Any) -> bytes:
    """Returns the same bytes for a profile and its repetitions; empty if the profile has no id.

    Includes times, in case that a Collector divides a profile into parts with the same id.
    """
    if not profile.profile_id or not profile.samples:
        return b""
    first, last = profile.samples[0].timestamps_unix_nano, profile.samples[-1].timestamps_unix_nano
    numbers = profile.time_unix_nano, len(profile.samples), sum(first[:1]), sum(last[-1:])
    return bytes(profile.profile_id) + struct.pack("<4Q", *numbers)


@contextmanager
def _indices_checked() -> Iterator[None]:
    try:
        yield
    except IndexError as error:
        raise outside_error() from error


class _Decoder:
    def __init__(self) -> None:
        self._profiles: dict[ProfileKey, _ProfileSamples] = {}
        self._accounts: dict[ProfileKey, dict[str, AttributeValue]] = {}
        self._waits: dict[tuple[ProfileKey, _ResourceKey], WaitTotals] = {}
        self._resources: dict[_ResourceKey, Resource] = {}
        self._shared = SharedValues()
        self._seen: set[bytes] = set()
        """Identities of the profiles in earlier messages."""
        self._new: set[bytes] = set()

    def add(self, message: Any) -> None:
        """Add a message's readable profiles, then raise an error if any profile is unreadable."""
        with _indices_checked():
            tables = Tables(message.dictionary, self._shared)
        problems: list[PayloadError] = []
        self._seen |= self._new
        self._new.clear()
        for resource_profiles in message.resource_profiles:
            with _indices_checked():
                resource = self._resource(resource_profiles, tables.values)
            for scope_profiles in resource_profiles.scope_profiles:
                for profile in scope_profiles.profiles:
                    try:
                        with _indices_checked():
                            self._add(profile, resource, tables)
                    except PayloadError as error:
                        problems.append(error)
        if problems:
            raise DamagedProfilesError(problems[0], len(problems))

    def _add(self, profile: Any, resource: _ResourceKey, tables: Tables) -> None:
        key, profile_id = tables.profile_key(profile), _identify(profile)
        if profile_id in self._seen:
            return
        if profile.attribute_indices:
            attributes = tables.attributes(profile.attribute_indices)
            self._accounts.setdefault(key, {}).update(attributes)
            if waits := parse_totals(attributes):
                self._waits[key, resource] = waits
        samples = self._profiles.setdefault(key, {}).setdefault(resource, {})
        for sample in profile.samples:
            identity = tables.identity(sample)
            series = samples.get(identity)
            if series is None:
                series = samples[identity] = _Series()
            series.add(profile, sample)
        if profile_id:
            self._new.add(profile_id)

    def _resource(self, resource_profiles: Any, values: Values) -> _ResourceKey:
        attributes = dict(values.read_all(resource_profiles.resource.attributes))
        typed = sorted((key, type(value).__name__, value) for key, value in attributes.items())
        key = (resource_profiles.schema_url, *typed)
        if key not in self._resources:
            self._resources[key] = Resource(attributes, resource_profiles.schema_url)
        return key

    def windows(self) -> list[Window]:
        """Returns a window for each interval, with at most one profile of each kind."""
        by_interval: dict[tuple[int, int], list[list[Profile]]] = {}
        for key, resources in self._profiles.items():
            kind, period, start, end = key
            account = parse_account(self._accounts.get(key, {}))
            profile = Profile(kind, period, self._groups(key, resources), *account)
            groups = by_interval.setdefault((start, end), [])
            for group in groups:
                if all(other.kind != kind for other in group):
                    group.append(profile)
                    break
            else:
                groups.append([profile])
        return [_window(*key, group) for key, groups in by_interval.items() for group in groups]

    def _groups(self, key: ProfileKey, resources: _ProfileSamples) -> list[ResourceSamples]:
        return [
            ResourceSamples(
                self._resources[resource],
                [
                    WindowSample(*identity[:5], series.times, series.values, *identity[5:])
                    for identity, series in samples.items()
                    if series.times
                ],
                self._waits.get((key, resource)),
            )
            for resource, samples in resources.items()
            if (key, resource) in self._waits or any(series.times for series in samples.values())
        ]


def _window(start: int, end: int, profiles: list[Profile]) -> Window:
    """Build a window that spans all samples, including those outside their profile's interval."""
    for profile in profiles:
        for group in profile.resources:
            for sample in group.samples:
                start = min(start, *sample.timestamps_unix_ns)
                end = max(end, max(sample.timestamps_unix_ns) + 1)
    return Window(start, end, profiles)


class _Series:
    """The timestamps and values of identical samples; ``values`` is empty if every value is 1."""

    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times: list[int] = []
        self.values: list[int] = []

    def add(self, profile: Any, sample: Any) -> None:
        """Add a sample. If it has no timestamps, sum its values at the profile's start time."""
        times, values = list(sample.timestamps_unix_nano), list(sample.values)
        if times and not (values or self.values):
            self.times += times
            return
        if not times:
            if not values:
                raise PayloadError("a sample has neither timestamps nor values")
            if not any(values):
                return  # a sample whose values are all 0 has no effect
            times, values = [profile.time_unix_nano], [sum(values)]
        if values and len(values) != len(times):
            raise PayloadError(f"a sample has {len(times)} timestamps, but {len(values)} values")
        if values.count(1) == len(values):
            values = []
        if values and not self.values:
            self.values = [1] * len(self.times)
        if values or self.values:
            self.values += values or [1] * len(times)
        self.times += times
