"""Each benchmark can be imported."""

import importlib

import pytest

from benchmarks.__main__ import TOPICS


@pytest.mark.parametrize("topic", TOPICS)
def test_each_benchmark_can_be_loaded(topic):
    assert importlib.import_module(f"benchmarks.bench_{topic}").rows
