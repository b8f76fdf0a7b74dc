"""Old and new targets fit into the map together, however many descendants there are."""

from types import SimpleNamespace

import pytest

from otel_kprofiler.sampling import follower as module
from otel_kprofiler.sampling.follower import ProcessFollower
from otel_kprofiler.sampling.sampler import SamplerConfig
from otel_kprofiler.sampling.target_maps import SLOTS, target_map_entries


@pytest.fixture
def descendants(monkeypatch):
    process = SimpleNamespace(start_ticks=1)
    pids = set(range(10_000, 10_000 + 3 * SLOTS))
    monkeypatch.setattr(module, "read_process", lambda files, pid: process)
    monkeypatch.setattr(module, "read_processes", lambda files: dict.fromkeys(pids, process))
    monkeypatch.setattr(module, "find_descendants", lambda processes, roots: pids - roots.keys())


@pytest.mark.usefixtures("descendants")
@pytest.mark.parametrize("count", [1, SLOTS])
def test_targets_can_be_replaced_completely(count):
    given = tuple(range(1, 1 + count))
    followed = ProcessFollower(None, given, lambda: 0.0).pids
    entries = target_map_entries(SamplerConfig(target_pids=given))["targets"]
    assert set(given) <= set(followed)
    assert 2 * len(followed) <= entries
