"""A file is not retried immediately if a child used CPU time on it but returned no result."""

import os

from otel_kprofiler.host import RefusedFiles, identify_content
from otel_kprofiler.host.refused_files import MAX_REFUSED, REFUSAL_S


def test_a_rejected_file_is_not_retried_for_an_hour():
    now_s = 5.0
    refused = RefusedFiles(lambda: now_s)
    refused.add("file", "slow")
    now_s += REFUSAL_S - 1
    assert (refused.find("file"), refused.find("other")) == ("slow", None)
    now_s += 2
    assert refused.find("file") is None
    refused.add("file", "slow again")
    assert refused.find("file") == "slow again"


def test_a_persistent_failure_is_retried_at_growing_intervals():
    now_s, retries = 0.0, []
    refused = RefusedFiles(lambda: now_s)
    while now_s < 4 * REFUSAL_S:
        if refused.find("file") is None:
            refused.add("file", "busy", may_pass=True)
            retries.append(now_s)
        now_s += 10
    assert retries == [0, 30, 90, 210, 450, 930, 1890, 3810, 7410, 11010]


def test_the_oldest_rejections_are_evicted():
    refused = RefusedFiles(lambda: 0.0)
    for number in range(MAX_REFUSED):
        refused.add(number, "slow")
    refused.add(0, "slow again")
    refused.add(MAX_REFUSED, "slow")
    assert [refused.find(number) for number in (0, 1, 2, MAX_REFUSED)] == [
        "slow again", None, "slow", "slow",
    ]  # fmt: skip
    assert len(refused._reasons) == MAX_REFUSED


def test_a_changed_file_has_a_new_identity(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with open(path, "rb") as file, open(path, "rb") as same:
        identity = identify_content(file.fileno())
        assert identify_content(same.fileno()) == identity
        os.utime(path, ns=(1, 1))
        assert identify_content(file.fileno()) != identity
