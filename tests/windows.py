"""Makes windows for tests."""

from otel_kprofiler.model import ON_CPU, Profile, Resource, ResourceSamples, Window


def make_window(start, end, *groups, kind=ON_CPU, period_ns=10, **facts) -> Window:
    """Makes a window with one profile.

    Args:
        start: the start of the window, in nanoseconds of Unix time.
        end: the end of the window, in nanoseconds of Unix time.
        groups: for each process, its attributes and samples.
        kind: the kind of the samples.
        period_ns: the sampling period, in nanoseconds.
        facts: other fields of the profile.
    """
    resources = [ResourceSamples(Resource(attributes), samples) for attributes, samples in groups]
    return Window(start, end, [Profile(kind, period_ns, resources, **facts)])
