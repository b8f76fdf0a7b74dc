"""Makes windows for tests."""

from otel_kprofiler.model import ON_CPU, Profile, Resource, ResourceSamples, Window


def make_window(start, end, *groups, kind=ON_CPU, period_ns=10, **facts) -> Window:
    """Makes a window of one profile; times are Unix ns, and each group is (attributes, samples)."""
    resources = [ResourceSamples(Resource(attributes), samples) for attributes, samples in groups]
    return Window(start, end, [Profile(kind, period_ns, resources, **facts)])
