"""Folded stacks and the function table include every sample."""

import re

import pytest

from otel_kprofiler.formats import folded, function_rows, table

DEEP = "[0x401000];do_syscall_64_[k];vfs_read_[k];ext4_read_[k];inlined_[i]"
CUT = "[truncated]_[k];vfs_read_[k];vfs_read_[k];bpf_prog_1_x_[k];[vmlinux+0x300]_[k]"


def test_folded_lines_start_with_the_root_and_mark_incomplete_stacks(windows):
    results = folded(windows).splitlines()
    assert results == [f"a:b ;{CUT} 3", f"dd;{DEEP} 6", "dd;[no kernel stack]_[k] 1"]


def test_names_cannot_move_the_cursor_or_hide_a_line(hostile):
    for text in (folded(hostile, threads=True), table(hostile, width=200)):
        assert all(line.isprintable() for line in text.splitlines())
        assert "\\x1b[2J" in text
        assert "\\u202e" in text
    assert "\\xff" in folded(hostile)


def test_folded_output_by_thread_distinguishes_threads(windows):
    lines = folded(windows, threads=True).splitlines()
    assert f"dd;helper/71;{DEEP} 1" in lines
    assert f"dd;dd/7;{DEEP} 5" in lines


def test_folded_output_contains_every_sample(windows):
    counts = [int(line.rpartition(" ")[2]) for line in folded(windows).splitlines()]
    assert sum(counts) == sum(window.sample_count for window in windows) == 10


def test_the_table_counts_recursion_once_and_labels_gaps_with_their_reason(windows):
    rows = {
        row.function: row for row in function_rows(p for window in windows for p in window.profiles)
    }
    assert rows["vfs_read"][2:] == (0, 9)
    assert rows["inlined"][1:] == ("ext4", 6, 6)
    assert rows["[the address lies between the symbols of its module]"][1:] == ("vmlinux", 3, 3)
    assert rows["[user code is exported as addresses]"][1:] == ("user", 0, 6)
    assert sum(row.self_count for row in rows.values()) == 10


@pytest.mark.parametrize("width", [40, 80, 133])
def test_only_names_are_truncated_to_fit_the_table_width(windows, width):
    lines = table(windows, width=width).splitlines()
    assert max(map(len, lines)) <= width
    numbers = [re.match(r" +(\d+\.\d%) +(\d+\.\d%)  ", line) for line in lines[1:-1]]
    assert numbers[0].groups() == ("60.0%", "60.0%")
    assert all(numbers)


def test_a_table_reports_omitted_rows(windows):
    assert table(windows, limit=2).endswith("10 samples, 9 functions, 7 not shown\n")
    assert table([]).endswith("0 samples, 0 functions\n")
