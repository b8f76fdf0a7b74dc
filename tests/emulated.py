"""Runs Python for arm64 with qemu-user."""

import os
import shutil
import subprocess
import sysconfig

import pytest

from tests.sources import PACKAGE

ROOT = PACKAGE.parent


def run_on_arm64(*arguments):
    """Runs Python 3.11 or later from the arm64 root file system `KPROFILER_ARM64_ROOT`."""
    qemu, root = shutil.which("qemu-aarch64-static"), os.environ.get("KPROFILER_ARM64_ROOT")
    if not qemu or not root:
        pytest.skip("needs qemu-user-static and KPROFILER_ARM64_ROOT, an arm64 root file system")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"}
    command = [qemu, "-L", root, f"{root}/usr/bin/python3", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
