"""setup.sh chooses an interpreter, and reuses or replaces an existing environment.

The tests use real interpreters, environments and pip, and install a small package without
dependencies. Tests that run as root hide the system's interpreter in a mount namespace.
"""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.readme import block_below

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/installation.md").read_text()
SYSTEM = Path("/usr/bin/python3")
TOOLS = "/usr/bin:/bin"
BUILD = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
FILES = {
    "shown.py": "import os, sys\ndef main(): print(os.path.realpath(sys._base_executable))\n",
    "otel_kprofiler-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: otel-kprofiler\n"
    "Version: 1\nProvides-Extra: test\nProvides-Extra: dev\n",
    "otel_kprofiler-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
    "Root-Is-Purelib: true\nTag: py3-none-any\n",
    "otel_kprofiler-1.dist-info/entry_points.txt": "[console_scripts]\nshow = shown:main\n",
    "otel_kprofiler-1.dist-info/RECORD": "",
}
BUILD_BACKEND = """
import shutil
def build_editable(directory, *_, **__):
    return shutil.copy("otel_kprofiler-1-py3-none-any.whl", directory).rpartition("/")[2]
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts and other users")
PACKAGES = ("python3-venv", "libbpf1")
pytestmark = pytest.mark.skipif(
    not shutil.which("dpkg-query")
    or subprocess.run(["dpkg-query", "--show", *PACKAGES], capture_output=True).returncode != 0,
    reason=f"{' and '.join(PACKAGES)} are not installed, and no test of choices installs packages",
)


def system_python():
    return str(SYSTEM.resolve())


@pytest.fixture
def clone(tmp_path):
    clone = tmp_path / "clone"
    (clone / "otel_kprofiler").mkdir(parents=True)
    shutil.copy(ROOT / "setup.sh", clone)
    (clone / "pyproject.toml").write_text(BUILD)
    (clone / "build.py").write_text(BUILD_BACKEND)
    with zipfile.ZipFile(clone / "otel_kprofiler-1-py3-none-any.whl", "w") as wheel:
        for name, content in FILES.items():
            wheel.writestr(name, content)
    return clone


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Creates a directory with a `python3` other than the system's, as pyenv and uv do."""
    home = tmp_path_factory.mktemp("elsewhere")
    (home / "bin").mkdir()
    shutil.copy(SYSTEM.resolve(), home / "bin/python3")
    library = subprocess.check_output([SYSTEM, "-c", "import os; print(os.__file__)"], text=True)
    (home / "lib").mkdir()
    (home / "lib" / Path(library).parent.name).symlink_to(Path(library).parent)
    return home / "bin"


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Creates a directory whose `python3` reports a version that is too old."""
    directory = tmp_path_factory.mktemp("older")
    program = directory / "python3"
    # a copy, because some tests hide the system's Python
    shutil.copy(SYSTEM.resolve(), directory / "real")
    program.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-I -c" ] || exit 1\nPYTHONHOME=/usr exec {directory}/real -c '
        '"import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$3"\n'
    )
    program.chmod(0o755)
    return directory


def set_up(clone, *words, path=(), system=None, wrapper=(), **environ):
    """Runs setup.sh with ``path`` prepended to PATH and ``system`` mounted over system Python."""
    command = [*wrapper, "./setup.sh", *words]
    if system:
        mount = f'mount --bind "$0" {system_python()} && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, system, *command]
    searched = ":".join([*map(str, path), TOOLS])
    environ = {"PATH": searched, "HOME": str(clone), **environ}
    done = subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True)
    if done.stderr.startswith("unshare: "):
        pytest.skip(f"cannot create a mount namespace: {done.stderr.strip()}")
    return done


def chosen(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.system
def test_the_system_python_is_preferred_over_pythons_on_the_path(clone, elsewhere, older):
    ages = set()
    for path in ([elsewhere], [], [older]):
        done = set_up(clone, "show", path=path)
        assert chosen(done) == system_python()
        assert f"Python is {system_python()} (" in done.stderr
        assert (f"the system's, not {path[0]}/python3" if path else "the system's\n") in done.stderr
        assert "replacing" not in done.stderr
        ages.add((clone / ".venv").stat().st_ino)
    assert len(ages) == 1, "made once, and kept"


@pytest.mark.long
@pytest.mark.system
def test_an_unusable_virtual_environment_is_replaced_and_reported(clone, elsewhere):
    venv = clone / ".venv"

    def make(python):
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)

    make(elsewhere / "python3")
    done = set_up(clone, "show", path=[elsewhere])
    assert f"replacing .venv: it is of {elsewhere}/python3 (" in done.stderr
    assert chosen(done) == system_python()

    make(SYSTEM)
    done = set_up(clone, "show")
    assert "replacing .venv: it has no pip" in done.stderr
    assert chosen(done) == system_python()

    moved = clone.rename(clone.parent / "moved")
    done = set_up(moved, "show")
    assert "replacing .venv: it was made for another directory" in done.stderr
    assert chosen(done) == system_python()
    assert str(moved) in (moved / ".venv/bin/show").read_text()


@pytest.mark.long
@pytest.mark.system
def test_a_broken_virtual_environment_owned_by_another_user_is_replaced(clone):
    venv = clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin/python").symlink_to("/gone/python3")
    if os.geteuid() == 0:
        os.chown(venv / "bin", 65534, 65534)
    done = set_up(clone, "show")
    why = "another user has made it" if os.geteuid() == 0 else "not found"
    assert re.search(f"replacing .venv: .*{why}", done.stderr)
    assert chosen(done) == system_python()


@pytest.mark.system
def test_a_directory_that_is_not_a_virtual_environment_is_kept(clone):
    (clone / ".venv").mkdir()
    (clone / ".venv/precious").touch()
    done = set_up(clone, "show")
    assert done.returncode == 1
    assert "error: .venv is not a virtual environment\nfix: " in done.stderr
    assert (clone / ".venv/precious").exists()


@pytest.mark.long
@pytest.mark.system
@needs_root
def test_setup_searches_for_a_python_if_the_system_python_is_unusable(clone, elsewhere, older):
    done = set_up(clone, "show", path=[older, elsewhere], system="/dev/null")
    assert done.returncode == 1
    assert not (clone / ".venv").exists()
    assert re.search("error: no usable Python is installed: /usr/bin/python3: .+; ", done.stderr)
    assert f"; python3: {older}/real (3.9.2) is older than 3.11; " in done.stderr
    assert "fix: install CPython 3.11 or later" in done.stderr

    done = set_up(clone, "show", path=[elsewhere], system=older / "python3")
    assert chosen(done) == str(elsewhere / "python3")
    assert "by the PATH, since the system's cannot be used" in done.stderr

    done = set_up(clone, "show", system="/dev/null")  # as under sudo, which resets the PATH
    assert chosen(done) == str(elsewhere / "python3")
    assert "which .venv is of" in done.stderr


@pytest.mark.system
def test_if_python_is_set_no_other_interpreter_is_considered(clone, elsewhere, older):
    done = set_up(clone, "show", PYTHON=str(older / "python3"))
    assert done.returncode == 1
    assert re.search(r"error: PYTHON cannot be used: .* \(3\.9\.2\) is older.*\nfix: ", done.stderr)
    done = set_up(clone, "show", PYTHON=str(elsewhere / "python3"))
    assert chosen(done) == str(elsewhere / "python3")
    assert "as PYTHON says" in done.stderr


@pytest.mark.system
@needs_root
def test_setup_without_sudo_installs_everything_that_does_not_need_root(clone):
    public = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    try:
        shutil.copytree(clone, public / "clone")
        for path in (public, public / "clone", *(public / "clone").rglob("*")):
            os.chown(path, 65534, 65534)
        programs = public / "bin"
        programs.mkdir(mode=0o755)
        for directory in TOOLS.split(":"):
            for name in os.listdir(directory):
                if name != "sudo" and not (programs / name).exists():
                    (programs / name).symlink_to(f"{directory}/{name}")
        user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        environ = {"wrapper": user, "PATH": str(programs)}
        assert chosen(set_up(public / "clone", **environ)) == ""
        done = set_up(public / "clone", "show", **environ)
        assert done.returncode == 1
        assert "error: root is needed, and there is no sudo\nfix: " in done.stderr
    finally:
        shutil.rmtree(public)


@pytest.mark.long
@pytest.mark.system
@needs_root
def test_commands_use_programs_from_the_virtual_environment_and_the_system_python(clone):
    words = ["sh", "-c", "command -v show; command -v python3"]
    assert chosen(set_up(clone, *words)).split() == [f"{clone}/.venv/bin/show", "/usr/bin/python3"]
    away = clone.parent / "away"
    done = set_up(clone, *words, VENV=str(away))
    assert chosen(done).split() == [f"{away}/bin/show", "/usr/bin/python3"]


@pytest.mark.long
@pytest.mark.system
def test_setup_without_a_command_reports_the_next_step(clone):
    done = set_up(clone)
    assert chosen(done) == ""
    assert done.stderr.splitlines()[-1].startswith("setup: next: ./setup.sh bash ")


@pytest.mark.long
@pytest.mark.system
def test_long_steps_show_progress(clone):
    """The build waits until the test has read a dot from the output."""
    (clone / "build.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n" + BUILD_BACKEND
    )
    command = ["./setup.sh", "show"]
    process = subprocess.Popen(command, cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown = b""
    while not re.search(rb"installing this clone .*\(pip\) \.", shown):
        shown += (byte := process.stderr.read(1))
        assert byte, shown
    (clone / "go").touch()
    out, rest = process.communicate()  # returns after all processes have closed the pipe
    assert (out.decode().strip(), process.returncode) == (system_python(), 0), rest
    steps = [b"Python is ", b"creating .venv ", b"installing this clone "]
    assert [
        line[: len(step)] for line, step in zip(setup_lines(shown), steps, strict=True)
    ] == steps


def setup_lines(shown):
    return [line.removeprefix(b"setup: ") for line in shown.splitlines()]


@pytest.mark.long
@pytest.mark.system
def test_a_failing_step_aborts_the_setup(clone):
    (clone / "build.py").write_text("raise SystemExit('no build')\n")
    done = set_up(clone, "show")
    assert done.returncode != 0
    assert "no build" in done.stderr
    assert not (clone / ".venv/installed").exists()


@pytest.mark.long
@pytest.mark.system
def test_setup_reinstalls_a_clone_only_after_a_change(clone):
    def installs(*words):
        done = set_up(clone, *words)
        assert done.returncode == 0, done.stderr
        return "installing this clone" in done.stderr

    assert installs("show")
    assert not installs("show")
    (clone / "pyproject.toml").write_text(BUILD + "# changed\n")
    assert installs("show")
    assert not installs("show")
    subprocess.run([clone / ".venv/bin/pip", "uninstall", "-qy", "otel-kprofiler"], check=True)
    assert installs("show")
    assert "installing this clone" in set_up(clone.rename(clone.parent / "moved"), "show").stderr


@pytest.mark.system
def test_setup_rejects_an_unknown_option(clone):
    done = set_up(clone, "--test", "show")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no option --test\nfix: ")
    assert not (clone / ".venv").exists()


def test_every_error_is_documented():
    texts = re.findall(r"""\bfail (['"])(.*?)\1""", (ROOT / "setup.sh").read_text())
    documented = "".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    assert len(texts) == 5
    for _, text in texts:
        assert re.sub(r"\$\w+", "…", text) in documented


def test_readme_commands_run_the_setup_script():
    assert block_below("Try it").startswith("./setup.sh otel-kprofiler record ")
    assert block_below("Run the tests") == "./setup.sh --tests make test"
