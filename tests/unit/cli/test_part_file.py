"""The ``.part`` file of a recording, and the statement about its contents."""

import pytest

from otel_kprofiler.cli.output import Output
from otel_kprofiler.model import StreamTotals, WindowSample
from otel_kprofiler.otlp import read_profiles
from tests.full_disk import full_disk
from tests.windows import make_stack, make_window

START = 1_600_000_000 * 10**9


def make_second(number, count=3):
    """Returns a window in which each sample has another stack."""
    start = START + number * 10**9
    samples = [
        WindowSample(make_stack(f"function_{at}"), 7, "a", 0, None, [start + at])
        for at in range(count)
    ]
    return make_window(
        start,
        start + 10**9,
        ({}, samples),
        taken=count,
        totals=StreamTotals("ab" * 8, count, count, {}),
    )


@pytest.fixture
def output(tmp_path):
    return Output(str(tmp_path / "a.html"), None, force=False, keep_part=True)


def test_samples_missing_from_the_part_file_are_counted(output, tmp_path, capsys):
    output.part(make_second(0))
    output.part._reporter.force_flush()
    with full_disk():
        output.part(make_second(1, 5))
        output.close()
    error = capsys.readouterr().err
    assert "holds the samples taken so far, without 5 samples that could not be written" in error
    assert sum(window.sample_count for window in read_profiles(tmp_path / "a.html.part")) == 3


def test_a_part_file_without_samples_is_deleted(output, tmp_path, capsys):
    """The last message, with the counts of lost samples, is short enough to be written."""
    with full_disk(2000):
        output.part(make_second(0, 200))
        output.close()
    assert not capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_samples_are_kept_if_the_disk_has_space(output, tmp_path, capsys):
    output.part(make_second(0))
    output.close()
    assert "holds the samples taken so far; next:" in capsys.readouterr().err
