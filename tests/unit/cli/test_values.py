"""All reports show 0 % for values of zero, and reject negative values."""

import gzip
import random
import re

import pytest
from click.testing import CliRunner

from otel_kprofiler.cli.main import cli
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.formats import FORMATS
from otel_kprofiler.model import ON_CPU, ProfileKind, WindowSample
from tests.windows import make_stack, make_window, write_otlp

START = 10**18
KIND = ProfileKind("off_cpu", "off_cpu", "nanoseconds")
GROUPS = [
    "function", "line", "module", "syscall", "process", "thread", "comm", "container", "cpu",
    "span", "endpoint", "service", "kind", "cause", "state", "waker",
]  # fmt: skip


def write(path, values, kind=KIND):
    rows = []
    for number, value in enumerate(values):
        stack = make_stack(f"leaf{number % 5}", f"caller{number % 3}", "root")
        rows.append(WindowSample(stack, number % 4, "dd", 0, None, [START + number], [value]))
    group = {"process.pid": 7, "process.executable.name": "dd"}, rows
    write_otlp(path, make_window(START, START + 1000, group, kind=kind, period_ns=0))
    return path


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.mark.parametrize("seed", range(12))
def test_reported_percentages_are_between_0_and_100(tmp_path, seed):
    rng = random.Random(seed)
    highest = rng.choice([0, 0, 1, 10**6, 10**15])
    values = [rng.randrange(highest + 1) for _ in range(rng.randrange(1, 12))]
    before, after = (write(tmp_path / name, values) for name in ("before.otlp", "after.otlp"))
    for by in GROUPS:
        shown = run("report", "--idle", "--by", by, before)
        assert shown.exit_code == 0, (by, shown.output, shown.exception)
        shares = [float(share) for share in re.findall(r"(-?[0-9.]+)%", shown.output)]
        assert all(0 <= share <= 100 for share in shares), (by, shown.output)
        assert "nan" not in shown.output
        changes = run("diff", "--idle", "--by", by, before, after)
        assert changes.exit_code == 0, (by, changes.output, changes.exception)
        assert "nan" not in changes.output
        assert "nothing changed" in changes.output


@pytest.mark.parametrize("suffix", [row.suffix for row in FORMATS])
@pytest.mark.parametrize("values", [[0], [0, 0, 0], [0, 5]])
def test_every_format_shows_values_of_zero(tmp_path, suffix, values):
    path = write(tmp_path / "zero.otlp", values)
    done = run("report", "--idle", path, "-o", tmp_path / f"out{suffix}")
    assert done.exit_code == 0, (done.output, done.exception)
    content = (tmp_path / f"out{suffix}").read_bytes()
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    assert b"NaN" not in text
    assert b"nan%" not in text


@pytest.mark.parametrize("command", [["report"], ["diff"], ["view", "--no-browser"]])
@pytest.mark.parametrize("kind", [KIND, ON_CPU])
def test_negative_values_are_rejected_with_a_hint(tmp_path, command, kind):
    path = write(tmp_path / "difference.otlp", [5, -10, -1], kind)
    files = [path, path] if command == ["diff"] else [path]
    done = run(*command, *files)
    assert done.exit_code == 1
    error = done.exception
    assert isinstance(error, KProfilerError)
    assert (
        error.message
        == f"{path}: this is the difference between two profiles, with 2 values below 0"
    )
    assert "otel-kprofiler diff BEFORE AFTER" in error.hint
