"""Makes and moves windows for tests."""

from otel_kprofiler.model import ON_CPU, Profile, Resource, ResourceSamples, Window


def make_window(start, end, *groups, kind=ON_CPU, period_ns=10, **facts) -> Window:
    """Makes a window of one profile. Times are Unix ns, and each group is (attributes, samples)."""
    resources = [ResourceSamples(Resource(attributes), samples) for attributes, samples in groups]
    return Window(start, end, [Profile(kind, period_ns, resources, **facts)])


def move_window(window: Window, by_ns: int) -> Window:
    """Returns a window whose start, end and samples are moved by ``by_ns``."""
    moved = window.change_samples(
        lambda sample: sample._replace(
            timestamps_unix_ns=[time + by_ns for time in sample.timestamps_unix_ns]
        )
    )
    return Window(window.start_unix_ns + by_ns, window.end_unix_ns + by_ns, moved.profiles)
