"""GitHub workflows and templates are valid, and refer to existing targets and extras."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")),
}


@pytest.mark.skipif(
    not importlib.util.find_spec("check_jsonschema"), reason="no check-jsonschema (extra 'dev')"
)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_github_files_conform_to_their_schemas(schema):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    run = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True)
    assert SCHEMAS[schema]
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_refer_only_to_existing_targets_and_extras(path):
    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in re.findall(r"\bmake ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for extras in re.findall(r"'\.\[([\w,-]+)\]'", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_fast_tests_run_on_every_supported_python_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    wanted = [line.removeprefix(prefix) for line in project["classifiers"] if prefix in line]
    (listed,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/check.yml").read_text())
    assert re.findall(r'"([\d.]+)"', listed) == wanted
