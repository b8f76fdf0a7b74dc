"""The value of each group equals the sum over its samples."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_kprofiler.analysis import (
    GROUPINGS,
    Filter,
    callees,
    callers,
    group_samples,
    load_samples,
    merge_groups,
    select_group,
    select_sides,
    spans_with_lines,
)
from otel_kprofiler.model import (
    KERNEL_SIDE,
    OFF_CPU,
    ON_CPU,
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    Profile,
    Resource,
    ResourceSamples,
    SpanLink,
    Stack,
    Window,
    WindowSample,
)
from otel_kprofiler.otlp import decode_windows, encode_window
from tests.windows import timed_values

BPF = Module("bpf_prog_0123456789abcdef_watch", ModuleKind.BPF, None, FileId(""), 0)
MODULES = [
    None, BPF, *(Module(name, ModuleKind.USER, None, FileId(""), 0) for name in ("m", "n"))
]  # fmt: skip
LINKS = [None, *(SpanLink(bytes([n]) * 16, bytes([n]) * 8) for n in (1, 2))]

frame = st.builds(
    lambda module, name, line, side: Frame(
        module, 1, (Line(name, file="f.c", line=line),), 0, side
    ),
    st.sampled_from(MODULES), st.sampled_from("abc"), st.integers(0, 2),
    st.sampled_from([KERNEL_SIDE, USER_SIDE]),
)  # fmt: skip
stack = st.lists(frame, max_size=4).map(
    lambda frames: Stack.from_frames(sorted(frames, key=lambda sample: sample.side is USER_SIDE))
)


@st.composite
def samples(draw, has_values):
    times = draw(st.lists(st.integers(1000, 1999), min_size=1, max_size=3))
    values = [draw(st.integers(1, 9)) for _ in times] if has_values else []
    return WindowSample(
        draw(stack), draw(st.integers(1, 2)), draw(st.sampled_from(["t", "u"])),
        draw(st.sampled_from([0, 1, 2**80])), draw(st.sampled_from(LINKS)), times, values,
    )  # fmt: skip


@st.composite
def windows(draw):
    results = []
    for kind, period in [(ON_CPU, 7), (OFF_CPU, 0)]:
        groups = [
            ResourceSamples(
                Resource({"process.pid": pid, "service.name": "s" * pid}),
                draw(st.lists(samples(kind is OFF_CPU), min_size=1, max_size=3)),
            )
            for pid in draw(st.sets(st.integers(1, 2)))
        ]
        profile = Profile(kind, period, groups)
        results.append(Profile(kind, period, groups, profile.sample_count))
    return [Window(1000, 2000, results)]


def flat(made):
    """Counts samples individually, by name, because the objects themselves compare by identity."""
    return Counter(
        (
            profile.kind.name, profile.period_ns, tuple(sorted(resource.attributes.items())),
            tuple((frame.function, frame.lines, frame.side.name, frame.module and frame.module.name)
                  for frame in sample.stack.frames),
            sample.tid, sample.thread_name, sample.cpu, sample.link, time, value,
        )
        for window in made
        for profile in window.profiles
        for resource, sample in profile.samples
        for time, value in timed_values(sample)
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(windows())
def test_no_samples_are_lost_during_loading_and_encoding(made):
    loaded = load_samples(made)
    assert flat(loaded.windows()) == flat(made)
    assert loaded.count == sum(window.sample_count for window in made)
    again = decode_windows(
        batch.payload for window in loaded.windows() for batch in encode_window(window).batches
    )
    assert sum(window.sample_count for window in again) == loaded.count


@settings(max_examples=25, deadline=None)
@given(windows())
@pytest.mark.parametrize("by", GROUPINGS)
def test_self_weights_sum_to_the_total_and_group_totals_match_brute_force(by, made):
    loaded = load_samples(made)
    groups = GROUPINGS[by](loaded)
    weight = sum(p.measure(p.weight) for window in made for p in window.profiles)
    assert sum(group.own for group in groups) == weight
    assert sum(group.samples for group in groups) == loaded.count
    assert len({group.key for group in groups}) == len(groups)
    assert all(0 <= group.kernel <= group.own <= group.total <= weight for group in groups)
    if by == "function":
        totals = Counter()
        for window in made:
            for profile in window.profiles:
                for _, sample in profile.samples:
                    for name in {frame.function for frame in sample.stack.frames}:
                        totals[name] += profile.measure(sample.weight)
        # Functions with the same name in two modules form two groups, and a sample may be in both.
        for name, total in totals.items():
            of_name = [group.total for group in groups if group.key.name == name]
            assert max(of_name) <= total <= sum(of_name)


@settings(max_examples=25, deadline=None)
@given(windows())
@pytest.mark.parametrize("by", GROUPINGS)
def test_selecting_a_group_keeps_every_sample_that_contains_it(by, made):
    loaded = load_samples(made)
    for group in group_samples(loaded, by):
        selected = select_group(loaded, by, group.key)
        assert sum(selected.weights()) == group.total
        again = {group_sample.key: group_sample for group_sample in group_samples(selected, by)}
        assert again[group.key] == group


@settings(max_examples=25, deadline=None)
@given(windows(), st.integers(900, 2100))
@pytest.mark.parametrize("by", GROUPINGS)
def test_groups_merged_from_two_intervals_equal_those_for_both_intervals(by, made, edge):
    loaded = load_samples(made)
    parts = [group_samples(part, by) for part in loaded.split([edge])]
    assert sorted(merge_groups(parts)) == sorted(group_samples(loaded, by))


@settings(max_examples=50, deadline=None)
@given(windows())
def test_the_callers_and_the_callees_of_a_function_each_sum_to_its_total(made):
    loaded = load_samples(made)
    for group in group_samples(loaded, "function"):
        # [no stack] is not a function
        expected = 0 if group.key == ("[no stack]", "") else group.total
        for result in (callers(loaded, group.key), callees(loaded, group.key)):
            assert sum(one.own for one in result) == expected


def test_the_time_in_a_bpf_programs_function_includes_its_callees():
    vmlinux = Module("vmlinux", ModuleKind.VMLINUX, None, FileId(""), 0)
    names = [("htab_map_lookup", vmlinux), ("watch", BPF), ("do_syscall_64", vmlinux)]
    stack = Stack.from_frames(
        Frame(module, 1, (Line(name),), 0, KERNEL_SIDE) for name, module in names
    )
    sample = WindowSample(stack, 1, "t", 0, None, [1000, 1001])
    profile = Profile(ON_CPU, 7, [ResourceSamples(Resource({"process.pid": 1}), [sample])], 2)
    (group,) = group_samples(load_samples([Window(1000, 2000, [profile])]), "bpf")
    assert group.key == ("watch", "0123456789abcdef")
    assert (group.own, group.total, group.kernel, group.samples) == (14, 14, 14, 2)


@settings(max_examples=50, deadline=None)
@given(windows(), st.integers(900, 2100), st.integers(900, 2100))
def test_selecting_an_interval_keeps_exactly_its_samples(made, start, end):
    kept = load_samples(made).between(start, end)
    expected = Counter({one: count for one, count in flat(made).items() if start <= one[-2] < end})
    assert flat(kept.windows()) == expected


@settings(max_examples=50, deadline=None)
@given(windows(), st.sets(st.integers(900, 2100)).map(sorted))
def test_splitting_samples_at_times_equals_selecting_the_intervals_between_them(made, edges):
    samples = load_samples(made)
    results = [flat(part.windows()) for part in samples.split(edges)]
    bounds = zip([0, *edges], [*edges, 1 << 64], strict=True)
    assert results == [flat(samples.between(*bound).windows()) for bound in bounds]


FILTERS = {
    "cpus": ((1,), lambda value: value[6] == 1),
    "threads": (("t", "2"), lambda value: value[5] == "t" or value[4] == 2),
    "processes": (("1",), lambda value: ("process.pid", 1) in value[2]),
    "services": (("s?",), lambda value: ("service.name", "ss") in value[2]),
    "functions": (("a",), lambda value: any(frame[0] == "a" for frame in value[3])),
    "modules": (("[m]",), lambda value: any(frame[3] == "m" for frame in value[3])),
    "spans": (("0101",), lambda value: value[7] == LINKS[1]),
    "attributes": (("service.name=ss",), lambda value: ("service.name", "ss") in value[2]),
    "kinds": (("off_*",), lambda value: value[0] == "off_cpu"),
}


@settings(max_examples=25, deadline=None)
@given(windows())
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_exactly_the_matching_samples(name, made):
    wanted, matches = FILTERS[name]
    kept = Filter(**{name: wanted}).apply(load_samples(made))
    expected = Counter({one: count for one, count in flat(made).items() if matches(one)})
    assert flat(kept.windows()) == expected
    assert kept.count == expected.total()


@settings(max_examples=25, deadline=None)
@given(windows())
def test_callers_and_callees_of_a_function_each_sum_to_the_functions_total(made):
    loaded = load_samples(made)
    total = sum(
        profile.measure(sample.weight)
        for window in made
        for profile in window.profiles
        for _, sample in profile.samples
        if any(frame.function == "a" for frame in sample.stack.frames)
    )
    for groups in (callers(loaded, "a"), callees(loaded, "a")):
        assert sum(group.own for group in groups) == total
    outer = Counter()
    for window in made:
        for profile in window.profiles:
            for _, sample in profile.samples:
                names = [frame.function for frame in sample.stack.frames]
                if "a" in names:
                    at = len(names) - names[::-1].index("a")
                    name = names[at] if at < len(names) else "[no caller]"
                    outer[name] += profile.measure(sample.weight)
    results = Counter()
    for group in callers(loaded, "a"):
        results[group.key.name] += group.own
    assert results == outer


@settings(max_examples=25, deadline=None)
@given(windows())
def test_a_spans_totals_equal_the_sums_over_its_source_lines(made):
    for span, lines in spans_with_lines(load_samples(made)):
        assert sum(line.own for line in lines) == span.own
        assert sum(line.samples for line in lines) == span.samples


@settings(max_examples=25, deadline=None)
@given(windows())
def test_omitting_kernel_frames_keeps_all_samples(made):
    loaded = load_samples(made)
    kept = select_sides(loaded, ["user"])
    assert kept.count == loaded.count
    assert group_samples(kept, "process") == group_samples(loaded, "process")
    kernel = [sum(group.kernel for group in group_samples(part, "line")) for part in (kept, loaded)]
    assert kernel[0] == kernel[1]
    assert {side.kind for stack in kept.tables.stacks for side in stack.sides} <= {USER_SIDE}
