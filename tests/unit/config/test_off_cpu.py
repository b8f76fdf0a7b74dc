"""The key ``off_cpu`` configures the sampler, has a short form, and is validated."""

import pytest

from otel_kprofiler.errors import ConfigError
from otel_kprofiler.sampling import OffCpuConfig
from otel_kprofiler.sdk.schema import make_plan, read_settings
from tests.unit.config.minimal import load_agent

EVERYTHING = (
    "off_cpu: {enabled: true, samples_per_second_per_cpu: 0, min_duration: 2ms, wakers: true, "
    "causes: false}"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stacks: kernel", None),
        ("off_cpu: false", None),
        ("off_cpu: {samples_per_second_per_cpu: 5}", None),
        ("off_cpu: true", OffCpuConfig(leaves_out="process")),
        ("off_cpu: {enabled: true}", OffCpuConfig(leaves_out="process")),
        (
            EVERYTHING,
            OffCpuConfig(
                samples_per_second=0,
                min_duration_ns=2_000_000,
                wakers=True,
                causes=False,
                leaves_out="process",
            ),
        ),
    ],
)
def test_off_cpu_keys_configure_the_agents_sampler(line, expected):
    assert load_agent(line).sampler.off_cpu == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("off_cpu: {enabled: true, samples_per_second_per_cpu: 10001}", "10000"),
        ("off_cpu: {enabled: true, min_duration: 5s}", "4s"),
        ("off_cpu: {threshold: 1}", "threshold"),
        ("off_cpu: 7", "off_cpu"),
    ],
)
def test_invalid_off_cpu_settings_are_reported(line, message):
    with pytest.raises(ConfigError) as caught:
        load_agent(line)
    (problem,) = caught.value.problems
    assert message in f"{problem.key} {problem.message}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", OffCpuConfig(leaves_out="process")), ("false", None), ("", None)],
)
def test_the_off_cpu_environment_variable_accepts_each_documented_value(text, expected):
    assert make_plan(read_settings({"OTEL_KPROFILER_OFF_CPU": text})).sampler.off_cpu == expected


def test_otel_kprofiler_off_cpu_rejects_unknown_values():
    with pytest.raises(ConfigError) as caught:
        read_settings({"OTEL_KPROFILER_OFF_CPU": "sometimes"})
    assert [problem.key for problem in caught.value.problems] == ["OTEL_KPROFILER_OFF_CPU"]
