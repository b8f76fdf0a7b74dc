"""Functions that change a valid message so that it violates a rule for profiles or resources."""

from __future__ import annotations

from otel_kprofiler.otlp.rules import TABLES
from tests.unit.otlp.mutations import PROFILE, Mutations

RESOURCE = "resource_profiles[0]"
MUTATIONS = Mutations(
    [
        ("schema-url", f"{RESOURCE}.schema_url", ""),
        ("schema-url", f"{RESOURCE}.scope_profiles[0].schema_url", ""),
        ("key-form", f"{RESOURCE}.resource.attributes[0].key_strindex", 1),
        ("key-form", f"{RESOURCE}.resource.attributes[0].key", ""),
        ("sample-type", f"{PROFILE}.sample_type.unit_strindex", 0),
        ("period", f"{PROFILE}.period", 0),
        ("profile-id", f"{PROFILE}.profile_id", b"12345678"),
        ("profile-id", f"{PROFILE}.profile_id", bytes(16)),
        ("original-payload", f"{PROFILE}.original_payload", b"x"),
        ("original-payload", f"{PROFILE}.original_payload_format", "pprof"),
    ]
)
breaks, add = MUTATIONS.breaks, MUTATIONS.add


def events_profile(m):
    profile = type(m.profile())()
    profile.sample_type.type_strindex = m.string("events")
    profile.sample_type.unit_strindex = m.string("count")
    return profile


def account(m, **counts):
    for key, count in counts.items():
        value = {"int_value": count} if isinstance(count, int) else {"string_value": count}
        name = f"otel_kprofiler.{key.replace('__', '~').replace('_', '.').replace('~', '_')}"
        m.profile().attribute_indices.append(m.attribute(name, **value))


def wait(m, **values):
    for key, value in values.items():
        field = "bool_value" if isinstance(value, bool) else "string_value"
        m.label(f"otel_kprofiler.wait.{key}", **{field: value})


add("no-empty", "scopes", lambda m: m.resource_profiles.add(schema_url="x"))
add("no-empty", "profiles", lambda m: m.resource_profiles[0].scope_profiles.add(schema_url="x"))
add("no-empty", "samples", lambda m: m.scope().profiles.append(events_profile(m)))
add("period", "no type", lambda m: m.profile().ClearField("period_type"))
add("account", "window below request", lambda m: account(m, window_samples=9))
add("account", "stream below window", lambda m: account(m, window_samples=20, stream_samples=19))
add("account", "taken below samples", lambda m: account(m, stream_samples=30, stream_taken=29))
add("account", "losses as text", lambda m: account(m, stream_lost_rejected="many"))
add("account", "negative losses", lambda m: account(m, window_lost_ring_full=-1))
add("account", "waits as text", lambda m: account(m, wait_total__ns_interruptible="long"))
add("waits", "unknown state", lambda m: wait(m, state="sleepy"))
add("waits", "unknown cause", lambda m: wait(m, state="interruptible", cause="boredom"))
add("waits", "cause without a state", lambda m: wait(m, cause="pipe"))
add("waits", "truth value as text", lambda m: wait(m, state="interruptible", is_ended="no"))


@breaks("no-empty")
def request_without_resources(m):
    del m.resource_profiles[:]
    for name in TABLES:
        del getattr(m.dictionary, name)[1:]


@breaks("resource-keys-unique")
def resource_key_twice(m):
    attributes = m.resource_profiles[0].resource.attributes
    attributes.add().CopyFrom(attributes[0])


@breaks("resource-keys-unique")
def scope_key_twice(m):
    for number in (1, 2):
        m.scope().scope.attributes.add(key="more").value.int_value = number


@breaks("resources-unique")
def resource_twice(m):
    m.resource_profiles.add().CopyFrom(m.resource_profiles[0])
    m.profile(-1).profile_id = b""


@breaks("creation-time")
def creation_time_as_number(m):
    for item in m.resource_profiles[0].resource.attributes:
        if item.key == "process.creation.time":
            item.value.string_value = "1750000000"


@breaks("period")
def period_of_wall_time(m):
    m.profile().period_type.type_strindex = m.string("wall")


@breaks("profile-order")
def on_cpu_last(m):
    events = events_profile(m)
    on_cpu = m.profile()
    events.time_unix_nano, events.duration_nano = on_cpu.time_unix_nano, on_cpu.duration_nano
    events.samples.append(on_cpu.samples[0])
    profiles = [events, *m.scope().profiles]
    del m.scope().profiles[:]
    m.scope().profiles.extend(profiles)


@breaks("profile-order")
def one_type_twice(m):
    copy = m.scope().profiles.add()
    copy.CopyFrom(m.profile())
    copy.profile_id = b""


@breaks("profile-id")
def profile_id_twice(m):
    m.profile().profile_id = m.profile(1).profile_id


@breaks("timestamps")
def timestamp_at_the_end(m):
    profile = m.profile()
    profile.samples[0].timestamps_unix_nano.append(profile.time_unix_nano + profile.duration_nano)


@breaks("timestamps")
def timestamp_before_the_start(m):
    profile = m.profile()
    profile.samples[0].timestamps_unix_nano.append(profile.time_unix_nano - 1)


@breaks("sample-values")
def nothing_counted(m):
    del m.profile().samples[0].timestamps_unix_nano[:]


@breaks("sample-values")
def more_values_than_timestamps(m):
    for sample in m.profile().samples:
        sample.values.extend([1] * (len(sample.timestamps_unix_nano) + 1))


@breaks("sample-values")
def two_values_without_timestamps(m):
    for sample in m.profile().samples:
        del sample.timestamps_unix_nano[:]
        sample.values.extend([1, 1])


@breaks("sample-shape")
def values_on_one_sample_only(m):
    sample = m.profile().samples[0]
    sample.values.extend([1] * len(sample.timestamps_unix_nano))


@breaks("sample-identity")
def sample_twice(m):
    samples = m.profile().samples
    samples.add().CopyFrom(samples[0])
    samples[-1].attribute_indices.reverse()


@breaks("kernel-first")
def stack_root_first(m):
    longest = max(m.dictionary.stack_table, key=lambda stack: len(set(stack.location_indices)))
    indices = list(longest.location_indices)
    native = [i for i, e in enumerate(m.dictionary.location_table) if e.address < 1 << 47 and i]
    assert set(indices) & set(native)
    del longest.location_indices[:]
    longest.location_indices.extend(indices[::-1])
