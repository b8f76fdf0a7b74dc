"""Benchmarks and the programs run by ``make`` targets can be imported."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import TOPICS

ROOT = Path(__file__).parents[2]
PROGRAMS = set(re.findall(r"-m ((?:tests|benchmarks)[\w.]*)", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("topic", TOPICS)
def test_each_benchmark_can_be_loaded(topic):
    assert importlib.import_module(f"benchmarks.bench_{topic}").rows


@pytest.mark.system
def test_every_program_run_by_a_make_target_can_be_imported():
    packages = {name for name in PROGRAMS if ROOT.joinpath(*name.split(".")).is_dir()}
    names = {f"{name}.__main__" if name in packages else name for name in PROGRAMS}
    assert len(names) > 10
    # pytest's import path also contains the test directories.
    code = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
