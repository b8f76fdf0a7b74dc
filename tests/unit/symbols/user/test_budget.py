"""Reading symbols from other users' files uses bounded memory."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from otel_kprofiler.elf import ElfError, ElfProblem
from otel_kprofiler.symbols.user.budget import ReadingBudget
from tests.further import further_of
from tests.unit.symbols.user import hostile_dwarf, read_hostile_files
from tests.unit.symbols.user.hostile_files import GO_FUNCTIONS, KINDS, go_lines, good

pytestmark = pytest.mark.system

LIMIT_MIB = 32
SLACK_MIB = 12  # for the allocator and code imported on demand
FILES = 20
DWARF_LIMIT_MIB = 12  # the child process may use 96 MiB more
ALL = int(os.environ.get("KPROFILER_HOSTILE_FILES", "0"))
"""Number of files of each kind to read. ``make test-hostile-files`` sets this variable to 20."""
SLOW = {"versions", "packed-symbols", "symbols-within-the-limit"}
"""The hostile files that are not rejected early; each takes a third of a second to read."""
ALIKE = {"dynamic-symbols", "packed-streams", "packed-symbols"}
"""The hostile files that are read or rejected in the same way as others."""
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Makes glibc return freed memory immediately (mallopt(3)), to exclude it from measurements."""


def read(folder, content, limit_mib, count, detail="names"):
    """Returns the report of a child process that reads a good file and a hostile file."""
    paths = folder / "good", folder / "hostile"
    for path, data in zip(paths, (good(), content), strict=True):
        path.write_bytes(data)
    words = *paths, limit_mib, count, detail
    done = subprocess.run(
        [sys.executable, "-m", read_hostile_files.__name__, *map(str, words)],
        env={**os.environ, **AT_ONCE, "XDG_CACHE_HOME": str(folder)},
        cwd=Path(__file__).parents[4], check=True, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    return json.loads(done.stdout)


def check_memory(report, limit_mib):
    """Checks that memory stayed within the limit and that the valid file's function is named."""
    assert report["peak_kib"] - report["before_kib"] <= (limit_mib + SLACK_MIB) * 1024, report
    assert report["good"] == [["good_000000"]], report


@pytest.mark.parametrize("kind", further_of(KINDS, [kind for kind in KINDS if kind not in ALIKE]))
def test_hostile_files_are_read_within_the_memory_limit(tmp_path, kind):
    count = ALL or (2 if kind in SLOW else FILES)
    report = read(tmp_path, KINDS[kind](), LIMIT_MIB, count)
    check_memory(report, LIMIT_MIB)  # tables within the limit are evicted to free memory for reads
    counts = report["counts"]
    assert counts["loaded"] + counts["refused"] == 1 + count, report


@pytest.mark.parametrize(
    "kind",
    further_of(hostile_dwarf.KINDS, ("line-rows", "nesting", "origins", "compressed-lines")),
)
def test_hostile_dwarf_is_converted_within_the_memory_limits(tmp_path, kind):
    """DWARF is converted by child processes, and is not held in memory by the reading process."""
    count = ALL or (1 if kind in hostile_dwarf.SLOW else 2)
    report = read(tmp_path, hostile_dwarf.KINDS[kind](), DWARF_LIMIT_MIB, count, "lines")
    check_memory(report, DWARF_LIMIT_MIB)
    assert report["peak_kib"] <= 80 << 10, report
    assert report["counts"]["loaded"] == 1 + count, report  # names load even if lines are refused
    if kind in hostile_dwarf.LARGE:
        (reason,) = report["reasons"]
        assert "takes more memory than the" in reason
        assert "raise" in reason
        assert report["counts"]["lines_refused"] == {"memory": count}
    if kind in hostile_dwarf.SLOW:
        assert report["counts"]["lines_refused"] == {"cpu_time": count}


def test_go_line_tables_are_read_within_the_memory_limit(tmp_path):
    """A file's lines are evicted together with its names."""
    report = read(tmp_path, go_lines(), LIMIT_MIB, FILES, "lines")
    counts = report["counts"]
    assert counts["loaded"] == 1 + FILES, report
    kept = FILES - counts["evicted"]
    assert counts["evicted"]
    # Each function requires thirteen bytes for its name and eight bytes for its lines.
    assert counts["bytes"] >= kept * 21 * GO_FUNCTIONS, report
    check_memory(report, LIMIT_MIB)


def test_a_rejection_message_states_the_size_and_the_configuration_key(tmp_path):
    report = read(tmp_path, KINDS["symbols-within-the-limit"](), 8, 1)
    assert report["counts"]["refused"] == 1
    (reason,) = report["reasons"]
    limit = "the limit is 6 MiB, three quarters of max_user_symbol_megabytes"
    assert f"{limit}; raise max_user_symbol_megabytes" in reason


def test_memory_held_during_a_read_is_limited_and_released():
    budget = ReadingBudget(100)
    with budget.reading():
        budget.take(60, "one")
        with budget.hold(40, "two"):
            assert budget.left_bytes == 0
        with pytest.raises(ElfError, match=r"reading other requires .* MiB in total") as caught:
            budget.take(41, "other")
        assert caught.value.problem is ElfProblem.TOO_LARGE
        assert budget.left_bytes == 40
    assert budget.left_bytes == 100


@pytest.mark.system
def test_an_abandoned_reader_does_not_block_other_readers_but_its_memory_is_still_counted():
    budget = ReadingBudget(100)
    is_reading, go_on = threading.Event(), threading.Event()

    def read():
        with budget.reading():
            budget.take(60, "a file")
            is_reading.set()
            go_on.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert is_reading.wait(30)
    budget.pass_turn(thread.ident)
    with budget.reading():
        assert budget.left_bytes == 40
        budget.take(40, "another file")
        go_on.set()
        thread.join()
        assert budget.held_bytes == 40
    assert budget.held_bytes == 0
