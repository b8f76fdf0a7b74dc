"""The doctor reports observations, requirements, and fixes that match the cause."""

import io
import os
import shlex
import sys

import pytest

from otel_kprofiler.cli.doctor import conclude
from otel_kprofiler.errors import HostError, SamplerError
from otel_kprofiler.host import (
    SymbolsVisibility,
    doctor,
    get_privilege_error,
    read_symbols_visibility,
)
from otel_kprofiler.host.kernel import find_lockdown, parse_release
from otel_kprofiler.model import Finding, Level
from tests.raising import raising

BPF, PERFMON, SYSLOG, ADMIN = 1 << 39, 1 << 38, 1 << 34, 1 << 21
PTRACE, SEARCH = 1 << 19, 1 << 2
ALL = BPF | PERFMON | SYSLOG | PTRACE | SEARCH


class FakeHost:
    """A host whose files are in a dictionary; its values are contents or exceptions to raise."""

    def __init__(self, effective=ALL, bounding=(1 << 41) - 1, **changes):
        self.files = {
            "/proc/self/status": f"CapEff:\t{effective:016x}\nCapBnd:\t{bounding:016x}\n",
            "/proc/sys/kernel/osrelease": "6.1.0-13-amd64\n",
            "/proc/sys/kernel/kptr_restrict": "1",
            "/proc/sys/kernel/perf_event_max_stack": "127",
            "/proc/kallsyms": "0000000000000000 A fixed\nffffffff81000000 T _text\n",
            "/sys/devices/system/cpu/online": "0-3",
            "/proc/self/limits": "",
            "/proc/self/ns/user": "user:[4026531837]",
            "/sys/kernel/btf/vmlinux": "",
            "/sys/module/ext4/sections/.text": "0xffffffffc0000000",
            "/sys/module/kernel/parameters/x": "",
        } | changes

    def read_bytes(self, path):
        value = self.files.get(path, FileNotFoundError(2, "No such file or directory"))
        if isinstance(value, OSError):
            raise value
        return value.encode()

    def open_fd(self, path):
        data = self.read_bytes(path)
        read, write = os.pipe()
        with io.FileIO(write, "w") as file:
            file.write(data)
        return read

    def read_link(self, path):
        return self.read_bytes(path).decode()

    def list_dir(self, path):
        below = [
            name.removeprefix(path + "/") for name in self.files if name.startswith(path + "/")
        ]
        if not below:
            raise FileNotFoundError(path)
        return sorted({name.split("/")[0] for name in below})


def findings(host, **options):
    options.setdefault("loaders", {"libbpf.so.1": True, "python3-bpfcc": False})
    return {finding.check: finding for finding in doctor(host, **options)}


def bad(host, **options):
    return {
        check: finding.level
        for check, finding in findings(host, **options).items()
        if finding.level is not Level.OK
    }


def test_the_doctor_finds_no_problems_on_a_supported_host():
    result = findings(FakeHost(), try_sampler=lambda: "2 samples")
    assert not bad(FakeHost())
    assert all(finding.observed for finding in result.values())
    assert result["sampler"].observed == "2 samples"
    assert result["CPUs"].observed == "4 online"


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"/proc/sys/kernel/osrelease": "5.4.0"}, "kernel", Level.FAIL),
        ({"effective": ALL & ~BPF}, "CAP_BPF", Level.FAIL),
        ({"effective": ALL & ~PERFMON}, "CAP_PERFMON", Level.FAIL),
        ({"/sys/kernel/security/lockdown": "none integrity [confidentiality]"}, "lockdown",
         Level.FAIL),
        ({"/proc/sys/kernel/perf_event_paranoid": "3"}, "kernel.perf_event_paranoid", Level.FAIL),
        ({"/proc/sys/kernel/perf_event_max_stack": "16"}, "kernel.perf_event_max_stack",
         Level.WARN),
        ({"/proc/sys/kernel/perf_event_max_sample_rate": "50"}, "kernel.perf_event_max_sample_rate",
         Level.WARN),
        ({"/sys/module/ext4/sections/.text": PermissionError(13, "Permission denied")},
         "module sections", Level.INFO),
        ({"/proc/self/ns/user": "user:[4026532210]"}, "user namespace", Level.FAIL),
        ({"/proc/kallsyms": "0000000000000000 T _text\n"}, "kernel symbols", Level.WARN),
        ({"/proc/kallsyms": FileNotFoundError(2, "no")}, "kernel symbols", Level.WARN),
        # CAP_SYS_ADMIN implies CAP_BPF and CAP_PERFMON, but not CAP_SYSLOG.
        ({"effective": ADMIN | PTRACE | SEARCH, "/proc/kallsyms": "0000000000000000 T _text\n"},
         "kernel symbols", Level.WARN),
    ],
)  # fmt: skip
def test_each_problem_causes_exactly_one_finding(changes, check, level):
    assert bad(FakeHost(**changes)) == {check: level}


def test_missing_btf_is_reported_but_is_not_a_failure():
    host = FakeHost()
    del host.files["/sys/kernel/btf/vmlinux"]
    assert bad(host) == {"kernel types (BTF)": Level.INFO}


def test_one_bpf_loader_is_sufficient_and_having_no_loader_is_a_failure():
    neither = {"libbpf.so.1": False, "python3-bpfcc": False}
    assert bad(FakeHost(), loaders=neither) == {"loader": Level.FAIL}
    assert not bad(FakeHost(), loaders=neither | {"python3-bpfcc": True})


def test_the_doctor_suggests_a_fix_for_a_sampler_that_cannot_start():
    refused = raising(SamplerError("the verifier refused it", hint="update"))
    finding = findings(FakeHost(), try_sampler=refused)["sampler"]
    assert (finding.level, finding.observed, finding.fix) == (
        Level.FAIL, "the verifier refused it", "update",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("restrict", "effective", "cause", "fix"),
    [
        ("2", ALL, SymbolsVisibility.KPTR_RESTRICT, "kptr_restrict=1"),
        ("2", BPF, SymbolsVisibility.KPTR_RESTRICT, "kptr_restrict=1; then "),
        ("1", BPF, SymbolsVisibility.NO_CAPABILITY, "+syslog"),
        ("0", BPF, SymbolsVisibility.NO_CAPABILITY, "+syslog"),
        ("1", ALL, SymbolsVisibility.NAMESPACE, "user namespace"),
    ],
)
def test_reasons_for_hidden_symbols_are_distinguished(restrict, effective, cause, fix):
    host = FakeHost(
        effective,
        **{
            "/proc/kallsyms": "0000000000000000 T _text\n" * 9,
            "/proc/sys/kernel/kptr_restrict": restrict,
        },
    )
    assert read_symbols_visibility(host) is cause
    assert fix in findings(host)["kernel symbols"].fix


def test_an_empty_kallsyms_is_treated_as_missing():
    assert read_symbols_visibility(FakeHost(**{"/proc/kallsyms": ""})) is SymbolsVisibility.NO_FILE


def test_the_fix_suggested_inside_a_container_applies_to_the_container():
    fix = findings(FakeHost(effective=0, bounding=0))["CAP_BPF"].fix
    assert "--cap-add BPF" in fix
    assert "setpriv" not in fix


LIMITS = "Max open files            {:<20} {:<20} files\n"


@pytest.mark.parametrize(
    ("soft", "hard", "level", "fix"),
    [
        (1024, 4096, Level.OK, ""),
        ("unlimited", "unlimited", Level.OK, ""),
        (64, 4096, Level.WARN, "ulimit -n 272, and "),
        (64, 100, Level.WARN, "sudo prlimit --pid $$ --nofile=272:272, and "),
    ],
)
def test_a_low_open_file_limit_is_reported_as_a_limitation(soft, hard, level, fix):
    result = findings(FakeHost(**{"/proc/self/limits": LIMITS.format(soft, hard)}))["open files"]
    assert result.level is level
    assert result.observed.startswith(str(soft))
    assert result.fix.startswith(fix)


def test_the_reason_why_the_sampler_cannot_start_is_a_low_open_file_limit():
    failed = HostError("setting up the sampler: too many open files", hint="ulimit")
    host = FakeHost(**{"/proc/self/limits": LIMITS.format(20, 20)})
    result = findings(host, try_sampler=raising(failed))
    assert result["open files"].level is Level.FAIL
    results = list(conclude(list(result.values())))
    assert results == ["does not work: open files", f"  open files: {result['open files'].fix}"]


def test_the_doctors_verdict_names_each_cause_once():
    assert list(conclude([Finding("CPUs", Level.OK, "2")])) == ["works"]
    limits = [Finding("a", Level.WARN, "", fix="x"), Finding("b", Level.INFO, "", fix="y")]
    assert list(conclude(limits)) == ["works with limits: a", "  a: x"]
    failed = [
        Finding("one", Level.FAIL, "", fix="x"),
        Finding("other", Level.FAIL, "", fix="z"),
        Finding("sampler", Level.FAIL, "", fix="x"),
    ]
    assert list(conclude([*failed, *limits])) == [
        "does not work: one, other", "  one, a: x", "  other: z"
    ]  # fmt: skip
    assert list(conclude(failed[2:])) == ["does not work: sampler", "  sampler: x"]


def test_setcap_is_suggested_only_for_a_dedicated_python(monkeypatch, tmp_path):
    own, link = tmp_path / "my python", tmp_path / "link"
    own.touch()
    link.symlink_to(own)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(own))
    fix = findings(FakeHost(effective=0))["CAP_BPF"].fix
    assert fix.endswith(f": setcap cap_bpf,cap_perfmon,cap_syslog+ep '{own}'")
    monkeypatch.setattr("sys.executable", str(link))
    assert "setpriv" in findings(FakeHost(effective=0))["CAP_BPF"].fix


def test_the_fix_includes_a_sudo_command_if_sudo_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sudo" not in findings(FakeHost(effective=0))["CAP_BPF"].fix
    (tmp_path / "sudo").touch(mode=0o755)
    fix = findings(FakeHost(effective=0))["CAP_BPF"].fix
    command = shlex.join([sys.executable, *sys.orig_argv[1:]])
    assert fix.startswith(f"run it as root: sudo {command}; or start it for this user, ")


def test_bpf_maps_count_as_locked_memory_on_old_kernels():
    """The limit on locked memory matters only before Linux 5.11."""
    limits = "Max locked memory         {0:<20} {0:<20} bytes\n"
    old = {"/proc/sys/kernel/osrelease": "5.10.0-21", "/proc/self/limits": limits.format(65536)}
    assert bad(FakeHost(**old)) == {"memory lock": Level.WARN}
    assert not bad(FakeHost(**old | {"/proc/self/limits": limits.format("unlimited")}))
    assert not bad(FakeHost(**old | {"/proc/sys/kernel/osrelease": "5.11.0"}))


@pytest.mark.parametrize(
    ("text", "version"),
    [("6.18.44", (6, 18, 44)), ("5.10.0-21-amd64\n", (5, 10, 0)), ("7.1-rc3", (7, 1, 0))],
)
def test_kernel_releases_are_parsed(text, version):
    assert parse_release(text)[:3] == version


def test_an_invalid_kernel_release_is_rejected():
    with pytest.raises(ValueError, match="not a kernel release"):
        parse_release("linux")


@pytest.mark.parametrize(
    ("effective", "missing"),
    [(ALL & ~PTRACE, "CAP_SYS_PTRACE"), (ALL & ~SEARCH, "CAP_DAC_READ_SEARCH")],
)
def test_each_missing_capability_for_reading_other_users_spans_is_reported(effective, missing):
    result = findings(FakeHost(effective))["spans and service names"]
    assert result.level is Level.WARN
    assert result.observed == f"only of this user's processes: {missing} missing"
    assert f"+{missing.lower().removeprefix('cap_')}" in result.fix


def test_lockdown_is_unknown_without_securityfs():
    assert find_lockdown(FakeHost()) is None
    assert find_lockdown(FakeHost(**{"/sys/kernel/security/lockdown": "[none] x"})) == "none"


def test_capabilities_kept_while_sampling_are_listed_with_their_purpose():
    result = {f.check: f for f in doctor(FakeHost(BPF | PERFMON | SYSLOG))}["kept while sampling"]
    assert "CAP_PERFMON (sampling CPUs" in result.observed
    assert "CAP_SYS_PTRACE" not in result.observed
    assert "CAP_BPF (unwind tables, and BPF programs" in result.observed


@pytest.mark.parametrize(("release", "is_told"), [("5.10.0-46-amd64", True), ("5.11.0", False)])
def test_the_hint_on_kernels_before_5_11_suggests_raising_the_locked_memory_limit(release, is_told):
    host = FakeHost(**{"/proc/sys/kernel/osrelease": release})
    error = get_privilege_error("loading the BPF program", host)
    assert "although no capability is missing" in str(error)
    assert "security module" in error.hint
    assert ("LimitMEMLOCK=infinity" in error.hint) == is_told
