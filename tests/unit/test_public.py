"""If other users cannot access the checkout or its Python, a public copy is made."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.public import NOBODY, copy_environment, publish_interpreter

pytestmark = pytest.mark.system

TESTS = Path(__file__).parents[1]
EXEMPT = {
    "test_fair_queue.py": "the child imports nothing from the checkout",
    "test_image.py": "the image's own Python",
    "test_deployment.py": "the wheel's own environment",
    "test_server.py": "no other program: a child that asks and ends",
    "test_writing.py": "no other program: the process itself changes its effective user",
}

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)


@pytest.fixture
def public_directory():
    directory = Path(subprocess.check_output(["mktemp", "-d", "/tmp/XXXXXXXX"], text=True).strip())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@needs_root
def test_a_copied_environment_imports_nothing_from_the_checkout(public_directory):
    python = copy_environment(public_directory)
    code = "import sys, grpc, otel_kprofiler, tests.public as t; print(*sys.path, t.__file__)"
    command = [*NOBODY, python.command, "-c", code]
    paths = subprocess.check_output(command, cwd="/", text=True).split()
    assert python.root.startswith(f"{public_directory}/")
    assert paths[-1] == f"{python.root}/tests/public.py"
    assert not any(path.startswith(f"{TESTS.parent}/") for path in paths)


@needs_root
def test_an_interpreter_in_an_inaccessible_directory_is_copied(public_directory):
    base, library = Path(sys._base_executable).resolve(), Path(os.__file__).parent
    home = public_directory / "home"
    program = publish_interpreter(base, home)
    if program == base:
        (home / "bin").mkdir(parents=True)
        (home / "lib").mkdir()
        program = Path(shutil.copy(base, home / "bin"))
        (home / "lib" / library.name).symlink_to(library)
    assert publish_interpreter(program, public_directory / "unused") == program
    home.chmod(0o700)
    copy = publish_interpreter(program, public_directory / "copy")
    code = "import os, sys; print(sys.executable, os.__file__)"
    asked = subprocess.check_output([*NOBODY, "env", copy, "-c", code], cwd="/", text=True)
    assert all(path.startswith(f"{public_directory}/copy/") for path in asked.split())


def test_tests_that_switch_users_use_the_public_environment():
    """With a different environment, these tests would fail in a clone that only root can access."""
    results = {
        path.name
        for path in TESTS.rglob("test_*.py")
        if re.search(r"--reuid|setre?s?uid\(|\bNOBODY, ", path.read_text())
        and "public" not in path.read_text()
    }
    assert results <= EXEMPT.keys()
