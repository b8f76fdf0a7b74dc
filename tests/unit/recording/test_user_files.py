"""Details of the files in user stacks are replayed as recorded."""

import json

import pytest

from otel_kprofiler.model import BuildId, FileDetails, FileId, FileKey, KnownFiles, Segment
from otel_kprofiler.recording.user_files import pack_user_files, parse_user_files

FILES = {
    FileKey(1 << 60, 8 << 20, 7): FileDetails(
        "/bin/a", BuildId("ab" * 20), FileId("cd" * 16), (Segment(0, 4096, 1 << 40),)
    ),
    FileKey(2, 8 << 20, 7): FileDetails("/memfd:\udcff", None, FileId("0" * 32), (), deleted=True),
}


def test_details_of_user_files_survive_a_round_trip():
    known = KnownFiles()
    for key, details in FILES.items():
        known.add(key, details)
    assert parse_user_files(json.loads(json.dumps(pack_user_files(known)))).all() == FILES


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1, 2, 3, "a", None, "b", [], False, 0],
        [-1, 2, 3, "a", None, "b", [], False],
        [1, 2, 3, 4, None, "b", [], False],
        [1, 2, 3, "a", 5, "b", [], False],
        [1, 2, 3, "a", None, "b", [[1, 2]], False],
        [1, 2, 3, "a", None, "b", 7, False],
    ],
)
def test_malformed_rows_in_a_recording_are_rejected(row):
    with pytest.raises((TypeError, ValueError)):
        parse_user_files([row])
