"""Adding a row to the table of formats makes a format available on the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from otel_kprofiler.formats import FORMATS
from otel_kprofiler.sampling import SamplerCounts
from tests.recordings import write_recording
from tests.records import pack_record

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[3] / "docs" / "record.md"
ANOTHER = """
from otel_kprofiler.cli.main import main
from otel_kprofiler.formats import FORMATS, OutputFormat

def threads(windows):
    groups = [group for window in windows for group in window.profiles[0].resources]
    return "\\n".join(s.thread_name for group in groups for s in group.samples)

FORMATS.append(OutputFormat("threads", ".threads", threads, "sort -u {}"))
main()
"""


@pytest.fixture
def recording(tmp_path):
    record = pack_record(100, (0xFFFFFFFF81000010,), comm=b"worker")
    return write_recording(tmp_path, {}, [record], {"on_cpu": SamplerCounts(1, {}, 0, {}, 1)})


@pytest.mark.parametrize("words", [["-o", "x.threads"], ["-o", "x.y", "--format", "threads"]])
def test_a_new_format_needs_only_a_registry_entry(tmp_path, recording, words):
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER, "record", "--replay", recording, *words],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f" · next: sort -u {words[1]}\n")
    assert (tmp_path / words[1]).read_text() == "worker"


def test_the_suggested_next_command_depends_on_the_format_not_the_suffix(tmp_path, recording):
    words = ["record", "--replay", recording, "-o", "x.html", "--format", "table"]
    done = subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", *words],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr.endswith(" · next: less -S x.html\n"), done.stderr


def test_each_file_suffix_identifies_exactly_one_format():
    suffixes = [row.suffix for row in FORMATS]
    assert not [(a, b) for a in suffixes for b in suffixes if a is not b and a.endswith(b)]
    assert len({row.name for row in FORMATS}) == len(FORMATS)


def test_the_record_page_lists_all_suffixes():
    _, _, text = PAGE.read_text().partition("| Suffix | For |\n|---|---|\n")
    table, _, _ = text.partition("\n\n")
    listed = re.findall(r"`(\.[a-z.]+)`", " ".join(row.split("|")[1] for row in table.splitlines()))
    assert sorted(listed) == sorted(row.suffix for row in FORMATS)
