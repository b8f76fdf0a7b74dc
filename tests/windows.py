"""Makes windows of samples."""

from otel_kprofiler.model import ON_CPU, Profile, Resource, ResourceSamples, Window


def make_window(start, end, *groups, kind=ON_CPU, period_ns=10, **facts) -> Window:
    """Returns a window with one profile.

    Args:
        start: its start, in nanoseconds of Unix time.
        end: its end, likewise.
        groups: a process's attributes and samples, for each process.
        kind: the kind of samples.
        period_ns: the sampling period.
        facts: other fields of the profile.
    """
    resources = [ResourceSamples(Resource(attributes), samples) for attributes, samples in groups]
    return Window(start, end, [Profile(kind, period_ns, resources, **facts)])
