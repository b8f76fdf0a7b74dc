"""The README's two commands work on minimal Debian and Ubuntu in either order, for any user.

mmdebstrap builds a root file system with apt. Commands in the root file system use the host's
network. Each clone is in a home directory that only its owner may enter. The commands run twice: as
root, and as a user who may run sudo and has other interpreters first on the PATH. In this test, the
README's test command runs only two test files.
"""

import os
import shutil
import subprocess

import pytest

from tests.collector.roots import ENVIRON, Root, find_certificates, make_archive
from tests.collector.units import ROOT
from tests.needs import PACKAGES
from tests.readme import block_below

TOOLS = ("mmdebstrap", "git", "unshare", "nsenter", "chroot")
SOME_TESTS = "tests/unit/test_layers.py tests/live/test_doctor.py"
OLDER = """#!/bin/sh
exec /usr/bin/python3 -c "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])" "$3"
"""

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(3000),
    PACKAGES,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]


@pytest.fixture(params=["", "trixie", "noble"], ids=["this release", "Debian 13", "Ubuntu 24.04"])
def root(tmp_path, request, sampling_host):
    archive = make_archive("minbase", "apt", release=request.param)
    path = tmp_path / "root"
    path.mkdir()
    subprocess.run(["tar", "-C", path, "-xf", archive, "--exclude=./dev/*"], check=True)
    shutil.copy("/etc/resolv.conf", path / "etc/resolv.conf")
    if certificates := find_certificates():
        shutil.copy(certificates, path / "etc/certificates.crt")
        (path / "etc/pip.conf").write_text("[global]\ncert = /etc/certificates.crt\n")
    root = Root(path, own_network=False)
    yield root
    root.close()
    shutil.rmtree(path)


def copy_clone(root, home):
    """Copies this checkout, with its changes, to a home directory that only its owner may enter."""
    clone = root.path / home / "clone"
    clone.mkdir()
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]
    names = subprocess.check_output([*listed, "--exclude-standard"], cwd=ROOT)
    pack = ["tar", "-C", ROOT, "-c", "--null", "--files-from=-", "--ignore-failed-read"]
    packed = subprocess.run(pack, input=names, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-C", clone, "-x", "--no-same-owner"], input=packed, check=True)
    (root.path / home).chmod(0o700)


def run_commands(root, headings, home, user, *path):
    said = []
    for heading in headings:
        script = (
            f"export PATH={':'.join([*path, ENVIRON['PATH']])} PYTEST_ADDOPTS='{SOME_TESTS}'\n"
            f"cd /{home}/clone\n{block_below(heading)}"
        )
        words = ["sh", "-c", script] if user == "root" else ["runuser", "-u", user, "--", "sh"]
        said.append(root.run(*words, *([] if user == "root" else ["-c", script])))
        if heading == "Try it":
            assert "wrote profile" in said[-1], said[-1]
            assert " 0 samples" not in said[-1], said[-1]
        else:
            assert "passed" in said[-1].splitlines()[-1], said[-1]
            assert "failed" not in said[-1].splitlines()[-1], said[-1]
    return said


def test_both_readme_commands_can_be_run_repeatedly_and_in_any_order(root):
    assert not (root.path / "usr/bin/python3").exists()
    for name in ("sudo", "make", "python3"):
        assert not (root.path / "usr/bin" / name).exists()
    (root.path / "root").mkdir(exist_ok=True)
    copy_clone(root, "root")
    headings = ["Try it", "Run the tests", "Try it", "Run the tests"]
    said = run_commands(root, headings, "root", "root")
    assert all("Python is /usr/bin/python3.1" in text for text in said)
    assert not any("replacing" in text for text in said)
    assert [("setup: installing " in text) for text in said] == [True, True, False, False]

    root.run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "sudo")
    (root.path / "etc/sudoers.d/tests").write_text(
        'somebody ALL=(ALL:ALL) NOPASSWD: ALL\nDefaults env_keep += "PYTEST_ADDOPTS"\n'
    )
    root.run("useradd", "--create-home", "somebody")
    copy_clone(root, "home/somebody")
    root.run("chown", "-R", "somebody:", "/home/somebody")
    root.run("apt-get", "remove", "-y", "-qq", "libbpf1", "make")
    older = root.path / "home/somebody/older/python3"
    older.parent.mkdir()
    older.write_text(OLDER)
    older.chmod(0o755)
    root.run("sh", "-c", "mkdir -p /home/somebody/pyenv/bin /home/somebody/pyenv/lib")
    root.run("sh", "-c", "cp /usr/bin/python3 /home/somebody/pyenv/bin")
    root.run("sh", "-c", "ln -s /usr/lib/python3.* /home/somebody/pyenv/lib")
    headings = ["Run the tests", "Try it", "Run the tests"]
    said = run_commands(root, headings, "home/somebody", "somebody", "/home/somebody/older")
    said += run_commands(root, ["Try it"], "home/somebody", "somebody", "/home/somebody/pyenv/bin")
    assert all("Python is /usr/bin/python3.1" in text for text in said)
    assert all("not /home/somebody/older/python3" in text for text in said[:3])
    assert "not /home/somebody/pyenv/bin/python3" in said[3]
    assert not any("replacing" in text for text in said)
    assert [("setup: installing " in text) for text in said] == [True, False, False, False]

    # Root runs the commands in the user's clone; then the user runs them again.
    said = run_commands(root, ["Try it"], "home/somebody", "root")
    said += run_commands(root, ["Try it"], "home/somebody", "somebody")
    assert all("replacing .venv: another user has made it" in text for text in said)
