"""Groups samples by span, and by the source lines that ran in each span."""

from collections import defaultdict

from otel_kprofiler.analysis.groups import (
    Group,
    Weighed,
    endpoints,
    group_samples,
    group_stacks,
    span_key,
)
from otel_kprofiler.analysis.occurrences import (
    NO_LINE,
    NO_STACK,
    Key,
    Occurrence,
    function_key,
    line_occurrence,
)
from otel_kprofiler.analysis.samples import Samples
from otel_kprofiler.formats import stack_entries
from otel_kprofiler.model import Stack


def spans_with_lines(samples: Samples) -> list[tuple[Group, list[Group]]]:
    """Returns a group for each span, together with groups for the span's source lines.

    Samples without line information are grouped by function.
    """
    stacks: defaultdict[Key, list[Weighed]] = defaultdict(list)
    keys = list(map(span_key, samples.tables.links))
    rows = zip(samples.links, samples.stacks, samples.weights(), samples.counts(), strict=True)
    for link, *row in rows:
        stacks[keys[link]].append(Weighed(*row))
    lines = {
        key: group_stacks(samples.tables, weighed, _line_or_function)
        for key, weighed in stacks.items()
    }
    return [(span, lines[span.key]) for span in group_samples(samples, "span")]


def endpoints_of_spans(samples: Samples) -> dict[Key, str]:
    """Returns the name of each span's local root, by span. Spans without a name are omitted."""
    links = samples.tables.links
    names = zip(links, endpoints(links), strict=True)
    return {span_key(link): name for link, name in names if name}


def _line_or_function(stack: Stack) -> Occurrence:
    occurrence = line_occurrence(stack)
    if occurrence.own != NO_LINE:
        return occurrence
    entries = stack_entries(stack)
    key = function_key(entries[-1]) if entries else NO_STACK
    return Occurrence(key, (key,))
