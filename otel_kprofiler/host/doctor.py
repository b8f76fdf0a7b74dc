"""Checks whether this user can profile this host, and suggests fixes for problems."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host.access import HostFiles
from otel_kprofiler.host.capabilities import (
    CONTEXTS,
    USER_NAMESPACE_FIX,
    Capabilities,
    get_capability_fix,
    is_in_user_namespace,
    read_capabilities,
)
from otel_kprofiler.host.cpus import read_online_cpus
from otel_kprofiler.host.kernel import (
    OLDEST_KERNEL,
    SymbolsVisibility,
    find_lockdown,
    find_sysctl,
    read_release,
    read_symbols_visibility,
)
from otel_kprofiler.host.open_files import TOO_MANY_FILES
from otel_kprofiler.host.privilege_errors import MEMORY_LOCK_FIX, counts_locked_memory
from otel_kprofiler.host.privileges import PURPOSES
from otel_kprofiler.host.throttling import MAX_SAMPLE_RATE, THROTTLING_FIX, get_tick_rate
from otel_kprofiler.model import MAX_FRAMES, Finding, Level
from otel_kprofiler.text import describe_count

_MEMORY_LOCK_BYTES: Final = 64 * 1024 * 1024
_OPEN_FILES: Final = 256
_OPEN_FILES_PER_CPU: Final = 4
MAX_PARANOID: Final = 2
"""Highest ``perf_event_paranoid`` in mainline kernels (admin-guide/sysctl/kernel.rst)."""
_OLDEST: Final = ".".join(map(str, OLDEST_KERNEL))

_ESSENTIAL: Final = {
    "/proc/self/status": "mount -t proc proc /proc",
    "/proc/sys/kernel/osrelease": "mount /proc without subset=pid (in a systemd unit: remove "
    "ProcSubset=pid)",
    "/sys/devices/system/cpu/online": "mount -t sysfs sysfs /sys",
}
"""Files without which nothing works, not even the other checks, with the fix for each."""


def find_unreadable(files: HostFiles) -> list[Finding]:
    """Returns a finding for each essential file that is unreadable. Call before :func:`doctor`."""
    findings = []
    for path, fix in _ESSENTIAL.items():
        try:
            files.read_bytes(path)
        except OSError as error:
            observed = error.strerror or str(error)
            findings.append(Finding(path, Level.FAIL, observed, "readable", fix))
    return findings


def doctor(
    files: HostFiles,
    *,
    loaders: Mapping[str, bool] | None = None,
    try_sampler: Callable[[], str] | None = None,
) -> list[Finding]:
    """Check everything that profiling depends on.

    The keys of ``loaders`` are the libraries that can load BPF programs, in order of preference; a
    value is True if the library is installed. One installed library is enough. ``try_sampler`` runs
    the real sampler briefly and describes the result; it raises ``KProfilerError`` or ``OSError``
    on failure. Checks whose argument is None are skipped.

    Returns:
        Returns the findings in the order in which to fix them. If no finding is a ``FAIL``,
        sampling works. If there is a ``WARN``, some data is missing from profiles.

    Raises:
        OSError: an essential file is unreadable; see :func:`find_unreadable`.
    """
    capabilities = read_capabilities(files)
    tried = list(_sampler(try_sampler))
    return [
        _kernel(files),
        *_capabilities(files, capabilities),
        _paranoid(files, capabilities),
        *_kept(files, capabilities),
        *_contexts(files, capabilities),
        *_loader(loaders),
        _open_files(
            files, has_failed=any(finding.observed.endswith(TOO_MANY_FILES) for finding in tried)
        ),
        *tried,
        _symbols(files, capabilities),
        _module_sections(files, capabilities),
        _btf(files),
        _lockdown(files),
        _cpus(files),
        _stack_depth(files),
        _sample_rate(files),
        _memory_lock(files),
    ]


def _kernel(files: HostFiles) -> Finding:
    release = read_release(files)
    level = Level.OK if release[:2] >= OLDEST_KERNEL else Level.FAIL
    fix = f"boot kernel {_OLDEST} or newer" if level is Level.FAIL else ""
    return Finding("kernel", level, release.text, f"{_OLDEST} or newer", fix)


def _capabilities(files: HostFiles, capabilities: Capabilities) -> Iterator[Finding]:
    if is_in_user_namespace(files):
        yield Finding(
            "user namespace", Level.FAIL, "a nested one: capabilities apply only inside it",
            "the initial one, where CAP_BPF and CAP_PERFMON are checked", USER_NAMESPACE_FIX,
        )  # fmt: skip
        return
    for name, purpose in (("CAP_BPF", "to load programs"), ("CAP_PERFMON", "to sample CPUs")):
        missing = capabilities.missing([name])
        if missing:
            fix = get_capability_fix(missing, capabilities)
            yield Finding(name, Level.FAIL, "missing", f"held, {purpose}", fix)
        else:
            yield Finding(name, Level.OK, "held", f"held, {purpose}")


def _paranoid(files: HostFiles, capabilities: Capabilities) -> Finding:
    """If perf_event_paranoid exceeds 2, Debian's kernels require CAP_SYS_ADMIN."""
    name = "kernel.perf_event_paranoid"
    level = find_sysctl(files, name)
    required = f"{MAX_PARANOID} or less, unless CAP_SYS_ADMIN is held"
    observed = "unknown" if level is None else str(level)
    if level is None or level <= MAX_PARANOID or not capabilities.missing(["CAP_SYS_ADMIN"]):
        return Finding(name, Level.OK, observed, required)
    fix = f"as root: sysctl -w {name}={MAX_PARANOID}"
    return Finding(name, Level.FAIL, observed, required, fix)


def _kept(files: HostFiles, capabilities: Capabilities) -> Iterator[Finding]:
    if is_in_user_namespace(files):
        return
    gone = set(capabilities.missing(PURPOSES))
    kept = [f"{name} ({purpose})" for name, purpose in PURPOSES.items() if name not in gone]
    yield Finding(
        "kept while sampling", Level.OK, "; ".join(kept) or "nothing",
        "each only in the threads that need it; none with service.privileges.drop_all",
    )  # fmt: skip


def _contexts(files: HostFiles, capabilities: Capabilities) -> Iterator[Finding]:
    if is_in_user_namespace(files):
        return
    check, required = "spans and service names", "memory of other users' processes is readable"
    missing = capabilities.missing(CONTEXTS)
    if not missing:
        yield Finding(check, Level.OK, "of all users' processes", required)
        return
    observed = f"only of this user's processes: {' and '.join(missing)} missing"
    fix = get_capability_fix(missing, capabilities)
    yield Finding(check, Level.WARN, observed, required, fix)


def _loader(loaders: Mapping[str, bool] | None) -> Iterator[Finding]:
    if loaders is None:
        return
    check, required = "loader", " or ".join(loaders)
    available = [name for name, installed in loaders.items() if installed]
    if available:
        yield Finding(check, Level.OK, " and ".join(available), required)
        return
    yield Finding(
        check, Level.FAIL, "none", required,
        "apt-get install libbpf1, dnf install libbpf, or apk add libbpf, as root; "
        "where only libbpf.so.0 is packaged: apt-get install python3-bpfcc",
    )  # fmt: skip


def _sampler(try_sampler: Callable[[], str] | None) -> Iterator[Finding]:
    if try_sampler is None:
        return
    required = "loads, attaches and delivers through the ring buffer"
    try:
        observed = try_sampler()
    except KProfilerError as error:
        yield Finding("sampler", Level.FAIL, error.message, required, error.hint)
    except OSError as error:
        observed = error.strerror or str(error)
        yield Finding("sampler", Level.FAIL, observed, required, "see the findings above")
    else:
        yield Finding("sampler", Level.OK, observed, required)


def _symbols(files: HostFiles, capabilities: Capabilities) -> Finding:
    visibility = read_symbols_visibility(files)
    required = "addresses in /proc/kallsyms, to name kernel functions"
    if visibility is SymbolsVisibility.VISIBLE:
        return Finding("kernel symbols", Level.OK, "addresses are visible", required)
    lower = "as root: sysctl -w kernel.kptr_restrict=1"
    missing = capabilities.missing(["CAP_SYSLOG"])
    fix = {
        SymbolsVisibility.NO_FILE: "mount /proc unmasked; a kernel that was built without "
        "CONFIG_KALLSYMS has no symbols",
        SymbolsVisibility.KPTR_RESTRICT: lower,
        SymbolsVisibility.NAMESPACE: USER_NAMESPACE_FIX,
        SymbolsVisibility.NO_CAPABILITY: "",
    }[visibility]
    if missing and visibility in (SymbolsVisibility.KPTR_RESTRICT, SymbolsVisibility.NO_CAPABILITY):
        fix = "; then ".join(filter(None, [fix, get_capability_fix(missing, capabilities)]))
    return Finding("kernel symbols", Level.WARN, f"hidden: {visibility.value}", required, fix)


def _module_sections(files: HostFiles, capabilities: Capabilities) -> Finding:
    check, required = "module sections", "/sys/module/*/sections/.text is readable"
    seen = 0
    for name in _names(files, "/sys/module"):
        if ".text" not in _names(files, f"/sys/module/{name}/sections"):
            continue
        seen += 1
        try:
            files.read_bytes(f"/sys/module/{name}/sections/.text")
        except OSError as error:
            missing = capabilities.missing(["CAP_DAC_READ_SEARCH"])
            fix = f"also give it {' and '.join(missing)}" if missing else ""
            return Finding(
                check, Level.INFO,
                f"{error.strerror}; module address ranges come from symbols instead",
                required, fix,
            )  # fmt: skip
    observed = describe_count(seen, "module") if seen else "no module is loaded"
    return Finding(check, Level.OK, observed, required)


def _names(files: HostFiles, path: str) -> list[str]:
    try:
        return files.list_dir(path)
    except OSError:
        return []


def _btf(files: HostFiles) -> Finding:
    check, required = "kernel types (BTF)", "/sys/kernel/btf/vmlinux, for processes' start times"
    if "vmlinux" in _names(files, "/sys/kernel/btf"):
        return Finding(check, Level.OK, "present", required)
    return Finding(
        check, Level.INFO, "absent: a reused pid may be attributed to the old process", required,
        "boot a kernel that was built with CONFIG_DEBUG_INFO_BTF=y",
    )  # fmt: skip


def _lockdown(files: HostFiles) -> Finding:
    mode = find_lockdown(files)
    required = "not confidentiality"
    if mode == "confidentiality":
        fix = "boot with lockdown=integrity, or without lockdown="
        return Finding("lockdown", Level.FAIL, mode, required, fix)
    return Finding("lockdown", Level.OK, mode or "not visible (securityfs)", required)


def _cpus(files: HostFiles) -> Finding:
    online = len(read_online_cpus(files))
    return Finding("CPUs", Level.OK, f"{online} online", "1 or more")


def _stack_depth(files: HostFiles) -> Finding:
    name = "kernel.perf_event_max_stack"
    fix = f"as root, before profiling: sysctl -w {name}={MAX_FRAMES}"
    return _compare(files, name, MAX_FRAMES, "deeper stacks are truncated", fix)


def _sample_rate(files: HostFiles) -> Finding:
    effect = "the kernel throttles the sampler after each sample"
    return _compare(files, MAX_SAMPLE_RATE, get_tick_rate() + 1, effect, THROTTLING_FIX)


def _compare(files: HostFiles, name: str, least: int, effect: str, fix: str) -> Finding:
    value, required = find_sysctl(files, name), f"{least} or more"
    if value is None or value >= least:
        return Finding(name, Level.OK, "unknown" if value is None else str(value), required)
    return Finding(name, Level.WARN, f"{value}: {effect}", required, fix)


def _open_files(files: HostFiles, *, has_failed: bool) -> Finding:
    """Each perf event, BPF map and open file uses a descriptor."""
    check = "open files"
    wanted = _OPEN_FILES + _OPEN_FILES_PER_CPU * len(read_online_cpus(files))
    soft, hard = _read_limit(files, "Max open files")
    required = f"{wanted} or more, for each CPU's events, unwind tables and symbols"
    if not has_failed and (soft == "unlimited" or int(soft) >= wanted):
        return Finding(check, Level.OK, soft, required)
    unit = f"in a systemd unit: LimitNOFILE={wanted}"
    command = f"ulimit -n {wanted}"
    if hard != "unlimited" and int(hard) < wanted:
        command = f"sudo prlimit --pid $$ --nofile={wanted}:{wanted}"
    fix = f"{command}, and start it from the same shell; {unit}"
    if has_failed:
        return Finding(check, Level.FAIL, f"{soft}: too few to sample", required, fix)
    return Finding(check, Level.WARN, f"{soft}: some stacks and names are missing", required, fix)


def _read_limit(files: HostFiles, name: str) -> tuple[str, str]:
    """Returns the soft and hard limits for this process, as numbers or ``unlimited``."""
    limits = files.read_bytes("/proc/self/limits").decode()
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", limits, re.MULTILINE)
    return (match[1], match[2]) if match else ("unlimited", "unlimited")


def _memory_lock(files: HostFiles) -> Finding:
    check = "memory lock"
    if not counts_locked_memory(files):
        return Finding(check, Level.OK, "not needed on this kernel", "")
    limit, _ = _read_limit(files, "Max locked memory")
    required = f"{_MEMORY_LOCK_BYTES} bytes or more, for rings and maps"
    if limit == "unlimited" or int(limit) >= _MEMORY_LOCK_BYTES:
        return Finding(check, Level.OK, limit, required)
    return Finding(check, Level.WARN, f"{limit} bytes", required, MEMORY_LOCK_FIX)
