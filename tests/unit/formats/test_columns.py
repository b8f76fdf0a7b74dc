"""The data embedded in a page contains a time axis, counts, and a summary of the recording."""

import pytest

from otel_kprofiler.formats import columns
from otel_kprofiler.formats.columns import pack
from otel_kprofiler.model import Stack, WindowSample
from tests.page import unpack
from tests.windows import make_window

SECOND = 10**9
START = 1_700_000_000 * SECOND
EMPTY = Stack.from_frames(())
HOST = {"host.name": "web-1", "os.version": "6.12.3", "process.pid": 7}


def window(start, end, times, *, period_ns=10_000_000, **attributes):
    """Returns a window with samples at the given times in seconds after START."""
    stamps = [START + int(time * SECOND) for time in times]
    group = {**HOST, **attributes}, [WindowSample(EMPTY, 7, "dd", 0, None, stamps)]
    start, end = START + start * SECOND, START + end * SECOND
    return make_window(start, end, group, period_ns=period_ns, taken=len(stamps))


def column(data, name):
    return unpack(data["samples"][name])


def test_samples_are_ordered_by_time_bin():
    data = columns([window(0, 15, [14.995, 0, 0.021, 0.025, 7.5])])
    assert (data["start_ms"], data["bin_ms"], data["bins"]) == (START / 1e6, 10, 1500)
    assert column(data, "bin") == [0, 2, 750, 1499]
    assert column(data, "count") == [1, 2, 1, 1]


@pytest.mark.parametrize(("seconds", "width"), [(1, 10), (16, 20), (600, 500), (86_400, 57_000)])
def test_the_number_of_time_bins_is_bounded(seconds, width):
    data = columns([window(0, seconds, [seconds - 0.001])])
    assert data["bin_ms"] in (width, width + 1000)
    assert column(data, "bin") == [data["bins"] - 1]
    assert data["bins"] <= 1500


def test_samples_outside_their_window_are_clamped_to_it():
    assert column(columns([window(1, 2, [0, 3])]), "bin") == [0, 99]


def test_samples_taken_at_two_rates_are_weighted_by_period():
    data = columns([window(0, 1, [0]), window(1, 2, [1], period_ns=20_000_000)])
    assert data["kinds"] == [
        {
            "name": "on_cpu",
            "unit": "nanoseconds",
            "period_ns": 0,
            "measure": "cpu",
            "longest_ns": 20_000_000,
        }
    ]
    assert column(data, "count") == [10_000_000, 20_000_000]


def test_the_title_and_the_summary_show_host_kernel_command_and_time():
    data = columns([window(0, 10, [1, 2])], title="make -j2")
    assert data["title"] == "make -j2 · web-1"
    assert data["summary"] == (
        "Linux 6.12.3 · 2 samples · 1 CPU · 10.0 s from 2023-11-14 22:13:20 UTC · 100 Hz · 0 lost"
    )
    both = [window(0, 1, [0]), window(0, 1, [0], **{"host.name": "web-2"})]
    assert columns(both)["title"] == "2 hosts"
    assert (columns([])["title"], columns([])["summary"]) == ("Profile", "no samples")


def test_numbers_are_packed_into_the_smallest_type():
    for numbers, code in (
        ([], "B"), ([0, 255], "B"), ([256], "H"), ([65_536], "I"), ([-1, 3], "i"), ([1 << 40], "d"),
    ):  # fmt: skip
        assert pack(numbers)[0] == code
        assert unpack(pack(numbers)) == numbers
