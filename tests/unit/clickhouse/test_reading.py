"""The SQL for ClickHouse queries, which tests/collector runs on a ClickHouse server."""

import subprocess
import sys
from dataclasses import fields

import pytest

from otel_kprofiler.analysis import GROUPINGS, Filter
from otel_kprofiler.cli.moments import parse_moment
from otel_kprofiler.clickhouse import need_of
from otel_kprofiler.clickhouse.conditions import filter_conditions, identifier, literal
from otel_kprofiler.clickhouse.need import _FILTERS
from otel_kprofiler.clickhouse.rows import Kind, _spread

ON_CPU = Kind("samples", "count", "cpu", "nanoseconds", 10)
OFF_CPU = Kind("off_cpu", "nanoseconds", "", "", 0)


def test_every_filter_and_grouping_reads_only_required_columns():
    assert {*_FILTERS, "attributes"} == {field.name for field in fields(Filter)}
    for by in GROUPINGS:
        assert need_of(Filter(), by) is not None
    need = need_of(Filter(attributes=("tenant=acme",), cpus=(1,)), "label:region")
    assert need.resources == {"tenant", "region"}
    assert need.samples == {"tenant", "region", "cpu.logical_number"}
    assert (need.stacks, need.links, need.times) == (False, False, False)


def test_strings_and_identifiers_are_quoted():
    assert literal(r"it's \ ") == r"'it\'s \\ '"
    assert identifier("a`b\\") == r"`a\`b\\`"


def test_a_filter_with_non_utf8_bytes_matches_their_escaped_form():
    (condition, *_) = filter_conditions(Filter(services=("caf\udce9",)), "t")
    assert r"'caf\\xe9'" in condition


def test_sql_conditions_match_every_string_that_the_pattern_matches():
    (result,) = filter_conditions(Filter(services=("a_%[bc]d*?",)), "t")
    assert r"ServiceName LIKE 'a\\_\\%%d%%'" in result
    assert "ServiceName IN ('a_%[bc]d*?')" in result


@pytest.mark.parametrize("function", ["[truncated]", "*", "?ead", "[rw]*"])
def test_patterns_that_may_match_truncation_frames_are_applied_by_the_client(function):
    assert not list(filter_conditions(Filter(functions=("read", function)), "t"))


def test_merging_preserves_the_count_the_sum_and_the_first_and_last_time_of_samples():
    assert _spread(ON_CPU, 1, 1, [5, 5]) == ([5], [])
    assert _spread(ON_CPU, 2, 2, [5, 9]) == ([5, 9], [])
    times, values = _spread(ON_CPU, 7, 7, [5, 9])
    assert (times, sum(values)) == ([5, 9], 7)
    times, values = _spread(OFF_CPU, 3, 100, [5, 9])
    assert (times, sum(values)) == ([5, 5, 9], 100)


def test_negative_durations_count_back_from_the_end():
    moments = [parse_moment(text) for text in ("10s", "-1m", "-0s", "-90")]
    assert [moment.unix_ns(10**12, 2 * 10**12) for moment in moments] == [
        10**12 + 10 * 10**9, 2 * 10**12 - 60 * 10**9, 2 * 10**12, 2 * 10**12 - 90 * 10**9,
    ]  # fmt: skip
    assert [moment.is_from_start for moment in moments] == [True, False, False, False]


@pytest.mark.system
def test_the_error_for_a_missing_clickhouse_library_names_the_extra():
    code = (
        "import sys; sys.modules['clickhouse_connect'] = None\n"
        "from otel_kprofiler.cli import main; sys.argv[1:] = ['report', 'clickhouse://h/otel']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "requires clickhouse-connect" in done.stderr
    assert "fix: pip install 'otel-kprofiler[clickhouse]'" in done.stderr
