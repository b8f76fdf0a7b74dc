"""The fixes that ``doctor`` prints on this host work."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from otel_kprofiler.host import Access, read_capabilities
from tests.commands import run_command
from tests.public import NOBODY, get_public_python

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        os.getuid() != 0
        or bool(read_capabilities(Access()).missing(["CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG"])),
        reason="needs root with CAP_BPF, CAP_PERFMON and CAP_SYSLOG",
    ),
    pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed"),
]


CODE = (
    "import json; from otel_kprofiler.host import Access, doctor; "
    "print(json.dumps({f.check: (f.level.value, f.fix) for f in doctor(Access())}))"
)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fix_for_missing_capabilities_works_as_printed(public_python):
    before = run([*NOBODY, public_python.command, "-c", CODE])
    for check in ("CAP_BPF", "CAP_PERFMON", "kernel symbols"):
        level, fix = before[check]
        assert level in ("fail", "warn")
        after = run(["sh", "-c", fix[fix.index("setpriv") :]])
        assert after[check] == ["ok", ""], check
        assert "fail" not in {level for level, _ in after.values()}


def test_file_capabilities_work_for_a_dedicated_python_executable(public_python):
    if not shutil.which("setcap"):
        pytest.skip("setcap is not installed")
    # Do not use pytest's directory, which is accessible only to its owner.
    directory = tempfile.mkdtemp(dir="/tmp")
    try:
        os.chmod(directory, 0o755)
        subprocess.run(
            [public_python.command, "-m", "venv", "--copies", "--without-pip", directory],
            check=True,
        )
        python = os.path.join(directory, "bin", "python")
        command = [
            *NOBODY, "env", f"PYTHONPATH={':'.join(public_python.paths)}", "LC_ALL=C", python,
            "-m", "otel_kprofiler", "doctor",
        ]  # fmt: skip
        before = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert before.returncode == 3, before.stderr
        last = before.stdout.splitlines()[-1]
        fix = last[last.index("setcap cap_bpf") :]
        done = subprocess.run(["sh", "-c", fix], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this file system does not support file capabilities: {done.stderr}")
        after = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert after.returncode == 0, after.stdout
        assert after.stdout.splitlines()[-1] == "works"
    finally:
        shutil.rmtree(directory)


@pytest.mark.long
def test_the_doctor_blames_a_low_open_file_limit():
    def conclude(limit):
        command = f'ulimit -S -n {limit}; exec "$0" -m otel_kprofiler doctor'
        done = subprocess.run(
            ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout.rpartition("\n\n")[2].splitlines()

    status, (verdict, fix) = conclude(24)
    assert (status, verdict) == (3, "does not work: open files")
    status, lines = conclude(re.search(r"ulimit -n (\d+)", fix)[1])
    assert status == 0
    assert lines[0].startswith("works")
    assert "open files" not in "".join(lines)


def enter_user_namespace(*words):
    done = run_command(*words, by=["unshare", "-Ur", *get_public_python().words])
    if "unshare failed" in done.stderr:
        pytest.skip("user namespaces are not allowed here")
    assert done.returncode == 3, done.stderr
    return done


def test_the_doctor_reports_a_user_namespace():
    result = json.loads(enter_user_namespace("doctor", "--json").stdout)
    assert (result["verdict"], result["causes"]) == ("does not work", ["user namespace"])
    rows = result["findings"]
    failed = {row["check"]: row for row in rows if row["level"] == "fail"}
    assert failed.keys() == {"user namespace", "sampler"}
    assert "this process is in a user namespace" in failed["sampler"]["observed"]
    lines = enter_user_namespace("doctor").stdout.splitlines()
    fixes = lines[lines.index("does not work: user namespace") + 1 :]  # also fixes for warnings
    expected = "user namespace, kernel symbols: run it in the host's user namespace"
    assert any(expected in fix for fix in fixes), fixes
    for row in failed.values():
        assert "host's user namespace" in row["fix"]
    assert not any(row["level"] == "ok" and row["check"].startswith("CAP_") for row in rows)
    assert not any("CAP_BPF" in row["fix"] for row in rows)


def test_the_error_in_a_user_namespace_names_the_namespace_as_the_cause(tmp_path):
    done = enter_user_namespace("record", "-d", "1s", "-o", str(tmp_path / "profile.html"))
    assert "this process is in a user namespace" in done.stderr
    assert "fix: run it in the host's user namespace" in done.stderr
    assert "dmesg" not in done.stderr


LIMITED = """
import json, resource
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
problems = []
for limit in range(3, 100):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 1000))
    sampler = EbpfSampler(SamplerConfig())
    try:
        sampler.start()
        break
    except KProfilerError as error:
        problems.append((type(error).__name__, error.message, error.hint))
    finally:
        sampler.close()
print(json.dumps(problems))
"""


@pytest.mark.long
def test_running_out_of_descriptors_at_any_point_during_startup_is_reported():
    problems = run([sys.executable, "-W", "ignore", "-c", LIMITED])
    assert len(problems) > 5
    for kind, message, hint in problems:
        assert kind == "HostError", message
        assert message.endswith(": too many open files")
        assert "ulimit -n" in hint


@pytest.mark.parametrize(
    ("change", "path", "fix"),
    [
        (
            "mount -t proc -o subset=pid proc /proc",
            "/proc/sys/kernel/osrelease",
            "mount /proc without subset=pid (in a systemd unit: remove ProcSubset=pid)",
        ),
        ("umount -l /sys", "/sys/devices/system/cpu/online", "mount -t sysfs sysfs /sys"),
    ],
)
def test_an_incomplete_proc_or_sys_is_reported_with_a_fix(change, path, fix):
    by = ["unshare", "-m", "sh", "-c", f'{change} && exec "$@"', "sh", *get_public_python().words]
    done = run_command("doctor", "--json", by=by)
    assert (done.returncode, done.stderr) == (3, "")
    report = json.loads(done.stdout)
    assert (report["verdict"], report["causes"]) == ("does not work", [path])
    assert fix in {finding["fix"] for finding in report["findings"]}
