"""The doctor on this host: its fix, followed to the letter, works."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from otel_kprofiler.host import Access, read_capabilities

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        os.getuid() != 0
        or bool(read_capabilities(Access()).missing(["CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"])),
        reason="needs root with CAP_BPF, CAP_PERFMON and CAP_SYSLOG",
    ),
    pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed"),
]

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
CODE = (
    "import json; from otel_kprofiler.host import Access, doctor; "
    "print(json.dumps({f.check: (f.level.value, f.fix) for f in doctor(Access())}))"
)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Permission denied" in done.stderr:
        pytest.skip("the Python of this environment is not readable for uid 65534")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fix_for_missing_capabilities_works_to_the_letter():
    before = run([*NOBODY, sys.executable, "-c", CODE])
    for check in ("CAP_BPF", "CAP_PERFMON", "kernel symbols"):
        level, fix = before[check]
        assert level in ("fail", "warn")
        after = run(["sh", "-c", fix[fix.index("setpriv") :]])
        assert after[check] == ["ok", ""], check
        assert "fail" not in {level for level, _ in after.values()}
