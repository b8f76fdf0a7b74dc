"""Rules for resources, scopes, profiles and samples."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from otel_kprofiler.model import WaitCause, WaitState
from otel_kprofiler.otlp.conventions import (
    EARLIER_LOST,
    EARLIER_SAMPLES,
    STREAM_LOST,
    STREAM_MISSED,
    STREAM_SAMPLES,
    STREAM_TAKEN,
    STREAM_UNKNOWN_SINCE,
    WAIT_BELOW,
    WAIT_CAUSE,
    WAIT_IS_ENDED,
    WAIT_STATE,
    WAIT_SWITCHES,
    WAIT_THRESHOLD,
    WAIT_TOTAL,
    WINDOW_LOST,
    WINDOW_SAMPLES,
    WINDOW_TAKEN,
)
from otel_kprofiler.otlp.rules import Contents, Problem, Rule, registry

RULES: Final[dict[str, Rule]] = {}
rule = registry(RULES)

_PROFILE_ID_BYTES: Final = 16
COUNTS: Final = (
    WINDOW_SAMPLES, WINDOW_TAKEN, WINDOW_LOST,
    STREAM_SAMPLES, STREAM_TAKEN, STREAM_MISSED, STREAM_LOST,
    EARLIER_SAMPLES, EARLIER_LOST, STREAM_UNKNOWN_SINCE,
    WAIT_TOTAL, WAIT_SWITCHES, WAIT_BELOW, WAIT_THRESHOLD,
)  # fmt: skip
_ON_CPU: Final = ("samples", "count")
_ISO_8601_UTC: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@rule
def no_empty(contents: Contents) -> Iterator[Problem]:
    """Requests, resources, scopes and profiles must not be empty."""
    if not contents.resources:
        yield "resource_profiles", "is empty"
    for places, field in (
        (contents.resources, "scope_profiles"),
        (contents.scopes, "profiles"),
        (contents.profiles, "samples"),
    ):
        for where, value in places:
            if not getattr(value, field):
                yield f"{where}.{field}", "is empty"


@rule
def schema_url(contents: Contents) -> Iterator[Problem]:
    """Each resource and each scope must have a schema_url."""
    for where, value in (*contents.resources, *contents.scopes):
        if not value.schema_url:
            yield f"{where}.schema_url", "is not set"


@rule
def key_form(contents: Contents) -> Iterator[Problem]:
    """Resource and scope attributes must have either key or key_strindex."""
    for where, attributes in contents.key_values():
        for position, (_, item) in enumerate(attributes):
            if bool(item.key) == bool(item.key_strindex):
                both = "both key and" if item.key else "neither key nor"
                yield f"{where}.attributes[{position}]", f"has {both} key_strindex"


@rule
def resource_keys_unique(contents: Contents) -> Iterator[Problem]:
    """Attribute keys must be unique within a resource or scope."""
    for where, attributes in contents.key_values():
        for key, count in Counter(key for key, _ in attributes).items():
            if count > 1 and key:
                yield f"{where}.attributes", f"key {key!r} occurs more than once"


@rule
def resources_unique(contents: Contents) -> Iterator[Problem]:
    """Each resource must occur only once in a request."""
    seen: dict[object, str] = {}
    for (where, value), (_, attributes) in zip(
        contents.resources, contents.key_values(), strict=False
    ):
        attribute_values = {
            key: contents.text(item.value) or item.value.SerializeToString(deterministic=True)
            for key, item in attributes
        }
        first = seen.setdefault((value.schema_url, frozenset(attribute_values.items())), where)
        if first != where:
            yield f"{where}.resource", f"is the same as in {first}"


@rule
def creation_time(contents: Contents) -> Iterator[Problem]:
    """process.creation.time must be an ISO 8601 time in UTC."""
    for where, attributes in contents.key_values():
        for key, item in attributes:
            if key == "process.creation.time":
                text = contents.text(item.value)
                if not _ISO_8601_UTC.fullmatch(text):
                    yield f"{where}.attributes", f"{text[:99]!r} is not an ISO 8601 time in UTC"


def _type(contents: Contents, value: Any) -> tuple[str, str]:
    return contents.string(value.type_strindex), contents.string(value.unit_strindex)


@rule
def sample_type(contents: Contents) -> Iterator[Problem]:
    """A profile's sample type must have a type and a unit."""
    for where, profile in contents.profiles:
        if not all(_type(contents, profile.sample_type)):
            yield f"{where}.sample_type", "lacks type or unit"


@rule
def period(contents: Contents) -> Iterator[Problem]:
    """A period requires a period type and vice versa; samples/count requires cpu/nanoseconds."""
    for where, profile in contents.profiles:
        period_type = _type(contents, profile.period_type)
        if any(period_type) != (profile.period > 0) or profile.period < 0:
            yield where, f"has period {profile.period} with type {'/'.join(period_type)!r}"
        on_cpu = _type(contents, profile.sample_type) == _ON_CPU
        if on_cpu and period_type != ("cpu", "nanoseconds"):
            yield f"{where}.period_type", "of samples/count must be cpu/nanoseconds"


@rule
def profile_order(contents: Contents) -> Iterator[Problem]:
    """A scope may have only one profile of each sample type. On-CPU samples must come first."""
    for where, scope in contents.scopes:
        types = [_type(contents, profile.sample_type) for profile in scope.profiles]
        if len(set(types)) < len(types):
            yield f"{where}.profiles", "has two profiles of the same sample type"
        if _ON_CPU in types[1:] and types[0] != _ON_CPU:
            yield f"{where}.profiles", "samples/count is not first"


@rule
def profile_id(contents: Contents) -> Iterator[Problem]:
    """A profile id must be absent, or unique and 16 bytes long, not all zero."""
    seen: dict[bytes, str] = {}
    for where, profile in contents.profiles:
        value = profile.profile_id
        if not value:
            continue
        if len(value) != _PROFILE_ID_BYTES or not any(value):
            yield f"{where}.profile_id", "must be 16 bytes, not all zero"
        first = seen.setdefault(value, where)
        if first != where:
            yield f"{where}.profile_id", f"is the same as in {first}"


@rule
def original_payload(contents: Contents) -> Iterator[Problem]:
    """The original_payload and its format must be set together."""
    for where, profile in contents.profiles:
        if bool(profile.original_payload) != bool(profile.original_payload_format):
            yield f"{where}.original_payload", "is set without its format, or the format without it"


@rule
def timestamps(contents: Contents) -> Iterator[Problem]:
    """Timestamps must lie in [time_unix_nano, time_unix_nano + duration_nano)."""
    for where, profile in contents.profiles:
        start, end = profile.time_unix_nano, profile.time_unix_nano + profile.duration_nano
        for index, sample in enumerate(profile.samples):
            for time in sample.timestamps_unix_nano:
                if not start <= time < end:
                    yield f"{where}.samples[{index}]", f"{time} is outside [{start}, {end})"


@rule
def sample_values(contents: Contents) -> Iterator[Problem]:
    """A sample must have timestamps, or one value, or as many values as timestamps."""
    for where, sample in contents.samples:
        values, times = len(sample.values), len(sample.timestamps_unix_nano)
        if not (times and values in (0, times)) and not (values == 1 and not times):
            yield where, f"has {values} values and {times} timestamps"


@rule
def sample_shape(contents: Contents) -> Iterator[Problem]:
    """A profile's samples must all have timestamps or all lack them, and likewise for values."""
    for where, profile in contents.profiles:
        shapes = {
            (bool(sample.values), bool(sample.timestamps_unix_nano)) for sample in profile.samples
        }
        if len(shapes - {(False, False)}) > 1:
            yield (
                f"{where}.samples",
                "only some of the samples have values, or only some have timestamps",
            )


@rule
def sample_identity(contents: Contents) -> Iterator[Problem]:
    """Samples of a profile must differ in stack, attributes or link."""
    for where, profile in contents.profiles:
        seen: dict[object, int] = {}
        for index, sample in enumerate(profile.samples):
            key = (sample.stack_index, frozenset(sample.attribute_indices), sample.link_index)
            first = seen.setdefault(key, index)
            if first != index:
                yield f"{where}.samples[{index}]", f"is the same as samples[{first}]"


@rule
def account(contents: Contents) -> Iterator[Problem]:
    """Account attributes must be integers >= 0. No total may be less than any of its counts."""
    held: Counter[tuple[object, ...]] = Counter()
    for _, profile in contents.profiles:
        held[_window(profile)] += sum(len(each.timestamps_unix_nano) for each in profile.samples)
    for where, profile in contents.profiles:
        attributes = contents.attributes(profile.attribute_indices)
        for key, value in attributes.items():
            if key.startswith(COUNTS) and not (
                value.HasField("int_value") and value.int_value >= 0
            ):
                yield where, f"{key} is not an integer >= 0"
        at_least = held[_window(profile)]
        for key in (WINDOW_SAMPLES, STREAM_SAMPLES, STREAM_TAKEN):
            if key in attributes:
                if attributes[key].int_value < at_least:
                    yield where, f"{key} is below {at_least}, which it includes"
                at_least = attributes[key].int_value


@rule
def waits(contents: Contents) -> Iterator[Problem]:
    """A wait sample must have a known state and cause, and a boolean ``is_ended``."""
    states, causes = {state.label for state in WaitState}, {state.label for state in WaitCause}
    for where, sample in contents.samples:
        attributes = contents.attributes(sample.attribute_indices)
        for key, labels in ((WAIT_STATE, states), (WAIT_CAUSE, causes)):
            if key in attributes and contents.text(attributes[key]) not in labels:
                yield where, f"{key} is {contents.text(attributes[key])!r}, which is unknown"
        if WAIT_CAUSE in attributes and WAIT_STATE not in attributes:
            yield where, f"{WAIT_CAUSE} is set without {WAIT_STATE}"
        if WAIT_IS_ENDED in attributes and not attributes[WAIT_IS_ENDED].HasField("bool_value"):
            yield where, f"{WAIT_IS_ENDED} is not a boolean"


def _window(profile: Any) -> tuple[object, ...]:
    kind = profile.sample_type.type_strindex, profile.sample_type.unit_strindex
    return *kind, profile.time_unix_nano, profile.duration_nano


@rule
def kernel_first(contents: Contents) -> Iterator[Problem]:
    """Stacks must be leaf first: kernel frames must precede all other frames."""
    kernel = [contents.is_kernel(entry) for entry in contents.dictionary.location_table]
    for where, stack in contents.table("stack_table"):
        sides = [kernel[index] for index in stack.location_indices if 0 <= index < len(kernel)]
        if sides != sorted(sides, reverse=True):
            yield where, "has a kernel frame after a user frame"
