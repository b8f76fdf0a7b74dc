"""The key ``events`` sets the sampler's events, and invalid values are rejected."""

import pytest

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.host import EventSpec
from tests.unit.config.minimal import load_agent


def test_events_are_sampled_in_addition_to_on_cpu_time():
    assert load_agent("stacks: kernel").sampler.events == ()
    sampler = load_agent('events: [page-faults, "cs:period=1000", "cycles:freq=49"]').sampler
    assert sampler.on_cpu
    assert sampler.events == (
        EventSpec("page-faults", 0, sampler.samples_per_second),
        EventSpec("context-switches", 1000, 0),
        EventSpec("cycles", 0, 49),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("events: [page-fault]", "did you mean page-faults"),
        ("events: [cpu-clock]", "set samples_per_second instead"),
        ("events: [cs, context-switches]", "selected twice"),
        ("events: page-faults", "list"),
    ],
)
def test_invalid_events_are_reported(line, message):
    with pytest.raises(ConfigError) as caught:
        load_agent(line)
    (problem,) = caught.value.problems
    assert message in problem.message
