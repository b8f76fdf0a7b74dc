"""Killed agents' samples arrive or count as lost. For more kills: ``make test-kills KILLS=200``."""

import os

import pytest

from tests.faults.kills import run_kills, run_truncations

KILLS = int(os.environ.get("KPROFILER_KILLS", "3"))
CUTS = int(os.environ.get("KPROFILER_CUTS", "40"))

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("sampling_host", "load"),
]


@pytest.mark.long
@pytest.mark.parametrize("fsync", ["always", "never"])
def test_delivered_data_accounts_for_every_sample_of_killed_agents(tmp_path, fsync):
    result = run_kills(tmp_path, KILLS, fsync, seed=KILLS)
    assert (result.difference, result.wrong) == (0, []), result
    assert result.received.sum("on_cpu")


@pytest.mark.long
def test_samples_lost_to_spool_truncation_are_counted_or_reported_as_unknown(tmp_path):
    assert run_truncations(tmp_path, CUTS, seed=CUTS) == []
