"""Nothing is imported from a working directory that other users can write to."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

CONFIG = """
receivers: {kprofiler: {}}
exporters: {debug: {}}
service: {pipelines: {profiles: {receivers: [kprofiler], exporters: [debug]}}}
"""
MODULES = (
    "click", "ctypes", "ipaddress", "json", "pickle", "pydantic", "resource", "rich", "ruamel",
    "struct", "traceback", "zipfile",
)  # fmt: skip
READ = """
import os
from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import PendingConfig
os.chdir({directory!r})
print(list(PendingConfig("agent.yaml", agent_config).get().exporters))
"""


@pytest.fixture
def hostile(tmp_path):
    """Creates a directory with all ``MODULES``. Each module creates a file when imported."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in MODULES:
        text = f"open({str(tmp_path / 'run')!r}, 'a').write({name!r} + ' ')\n"
        (directory / f"{name}.py").write_text(text)
    (directory / "agent.yaml").write_text(CONFIG)
    return directory


def run(words, directory, program=sys.executable, **environment):
    settings = {"cwd": directory, "env": {**os.environ, **environment}}
    return subprocess.run([program, *words], capture_output=True, text=True, **settings)


def check(done, hostile):
    assert (done.returncode, done.stderr) == (0, "")
    assert not (hostile.parent / "run").exists()


@pytest.mark.parametrize("variable", ["KPROFILER_NONE", "PYTHONPATH", "PYTHONHOME"])
def test_a_reload_imports_nothing_from_the_working_directory(hostile, tmp_path, variable):
    # The variable is set after startup, so that the parent's sys.path lacks the directory.
    script = f"import os\nos.environ[{variable!r}] = {str(hostile)!r}\n"
    path = tmp_path / "script.py"
    path.write_text(script + READ.format(directory=str(hostile)))
    done = run([path], hostile)
    check(done, hostile)
    assert done.stdout == "['debug']\n"


def test_the_child_imports_from_its_parents_path(hostile, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(READ.format(directory=str(hostile)))
    outside = os.path.realpath(sys.executable)  # not the virtual environment's interpreter
    done = run([path], tmp_path, program=outside, PYTHONPATH=os.pathsep.join(sys.path))
    check(done, hostile)
    assert done.stdout == "['debug']\n"


@pytest.mark.parametrize("options", [[], ["-I"]], ids=["plain", "isolated"])
@pytest.mark.parametrize("words", [["--help"], ["validate", "-c", "agent.yaml"]])
def test_the_command_imports_nothing_from_the_working_directory(hostile, options, words):
    check(run([*options, "-m", "otel_kprofiler", *words], hostile), hostile)
