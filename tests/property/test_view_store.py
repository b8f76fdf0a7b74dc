"""For any batches of samples, the ``view`` store returns the same samples as a plain list."""

import tempfile
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    Frame,
    Line,
    Profile,
    Resource,
    ResourceSamples,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.viewing import Query, SampleStore
from tests.unit.viewing.shown import answer, expected, shown

NOW, SPAN = 1_700_000_000_000_000_000, 10**11
KINDS = (ON_CPU, 10**7), (OFF_CPU, 0)
RESOURCES = [
    Resource({"process.pid": pid, "process.executable.name": name, "host.name": host})
    for pid, name, host in ((1, "init", "a"), (2, "sh", "a"), (3, "sh", "b"))
] + [Resource({"host.name": "b"}), Resource({})]


@st.composite
def stacks(draw):
    names = draw(st.lists(st.sampled_from("fgh"), max_size=4))
    return Stack.from_frames([Frame(None, 1, (Line(name),), 0, KERNEL_SIDE) for name in names])


@st.composite
def samples(draw):
    times = draw(st.lists(st.integers(NOW - SPAN, NOW - 1), min_size=1, max_size=4))
    values = draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times)))
    return WindowSample(
        draw(stacks()), draw(st.integers(1, 2)), draw(st.sampled_from("xy")),
        draw(st.integers(0, 1)), None, times, draw(st.sampled_from([(), values])),
    )  # fmt: skip


@st.composite
def windows(draw):
    kind, period = draw(st.sampled_from(KINDS))
    groups = st.builds(
        ResourceSamples, st.sampled_from(RESOURCES), st.lists(samples(), min_size=1, max_size=3)
    )
    return Window(NOW - SPAN, NOW, [Profile(kind, period, draw(st.lists(groups, max_size=3)))])


def moved(part, sample):
    times = [time // 4 * 4 + part for time in sample.timestamps_unix_ns]
    return sample._replace(timestamps_unix_ns=times)


@settings(max_examples=30)
@given(
    st.lists(st.lists(windows(), max_size=3), max_size=3),
    st.tuples(st.integers(NOW - SPAN, NOW), st.integers(NOW - SPAN, NOW)),
    st.sampled_from(["", "a", "b", "c"]),
)
def test_store_queries_match_a_scan_of_all_stored_windows(parts, times, host):
    # Shift each part in time, since samples contained in two parts would be counted only once.
    parts = [
        [one.change_samples(partial(moved, at)) for one in part] for at, part in enumerate(parts)
    ]
    start, end = (time // 1_000_000 * 1_000_000 for time in sorted(times))
    with (
        tempfile.TemporaryDirectory() as directory,
        SampleStore(f"{directory}/x.db", now_ns=lambda: NOW) as store,
    ):
        for part in parts:
            store.add(part)
        query = Query(start / 1e6, end / 1e6, None, f"host.name={host}" if host else "")
        data = answer(store, query, NOW)
    wanted = [
        Window(window.start_unix_ns, window.end_unix_ns, [
            Profile(profile.kind, profile.period_ns, [
                group
                for group in profile.resources
                if host in {"", group.resource.attributes.get("host.name")}
            ])
            for profile in window.profiles
        ])
        for part in parts
        for window in part
    ]  # fmt: skip
    assert shown(data) == expected(wanted, data, start, max(start + 1, end))
