"""CAP_BPF and CAP_PERFMON suffice to read spans from native programs."""

import json
import os
import subprocess

import pytest

from otel_kprofiler.host import Access, read_capabilities
from tests.commands import run_checked, run_command
from tests.needs import X86_64
from tests.public import NOBODY, TWO, as_nobody, open_directory
from tests.thread_contexts import build, write_payload
from tests.windows import read_samples

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0
        or bool(read_capabilities(Access()).missing(["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"])),
        reason="needs root with CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE",
    ),
    X86_64,
]
SOMEBODY = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")


@pytest.fixture
def folder():
    with open_directory(0o777) as folder:
        yield folder


@pytest.fixture
def record_as_nobody(folder, public_python):
    program, _ = build(folder, "descriptor")
    payload = write_payload(folder)

    def record(user):
        """Records a program, retrying longer on a busy host.

        Returns span links and standard error.
        """
        out = folder / f"{user[1]}.otlp"
        words = [*user, program, payload, folder / f"{user[1]}.log", "4"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            for duration in ("2s", "8s", "30s"):
                words = ["--force", "-F", 499, "-d", duration, "-p", process.pid, "-o", out]
                by = [*as_nobody(*TWO), *public_python.words]
                done = run_checked("record", *words, by=by, cwd=public_python.root)
                links = [sample.link for _, sample in read_samples(out) if sample.link]
                if len(links) > 20 or "not read" in done.stderr:
                    break
            process.kill()
        return links, done.stderr

    return record


def test_spans_in_the_same_users_processes_are_read_without_extra_capabilities(record_as_nobody):
    links, printed = record_as_nobody(NOBODY)
    assert len(links) > 20
    assert "not read" not in printed


@pytest.mark.long
def test_processes_with_unreadable_spans_are_counted_by_reason(record_as_nobody):
    links, printed = record_as_nobody(SOMEBODY)
    assert links == []
    reason = "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH missing"
    assert f"spans and service attributes of 1 process not read: {reason}\n" in printed


@pytest.mark.long
def test_the_doctor_reports_missing_capabilities_required_for_reading_spans(public_python):
    done = run_command("doctor", "--json", by=[*as_nobody(*TWO), *public_python.words])
    findings = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    finding = findings["spans and service names"]
    assert finding["level"] == "warn"
    assert finding["observed"].endswith("CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH missing")
    assert "+sys_ptrace" in finding["fix"]
