"""``otel-kprofiler doctor``: check whether this host can be profiled, and suggest fixes."""

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import click

from otel_kprofiler.bpf import BccLoader, LibbpfLoader
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.cli.versions import has_compiled_modules
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.host import Access, doctor, find_unreadable, is_in_user_namespace
from otel_kprofiler.interpreters import InterpreterRefused, open_own
from otel_kprofiler.model import Finding, Level
from otel_kprofiler.sampling import EbpfSampler, OffCpuConfig, SamplerConfig
from otel_kprofiler.speedups import library_problem
from otel_kprofiler.tracking import find_hidden_symbols, find_ksymbol_method

_MARKS = {Level.OK: "ok  ", Level.INFO: "info", Level.WARN: "WARN", Level.FAIL: "FAIL"}
_EXIT_HOST = 3


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict and the findings as JSON.")
def command(*, as_json: bool) -> None:
    """Check whether this host can be profiled, and suggest fixes if it cannot.

    The command runs the real sampler briefly, and then prints a verdict and a fix for each problem.
    The exit status is 0 if profiling works, even with limitations, and 3 if it does not work.
    """
    access = Access()
    loaders = {
        "libbpf.so.1": LibbpfLoader.is_installed(),
        "python3-bpfcc": BccLoader.is_installed(),
    }
    trial = _Trial()
    unreadable = find_unreadable(access)
    findings = unreadable or doctor(access, loaders=loaders, try_sampler=trial.run)
    findings += [*trial.findings, _find_speedups()]
    # In a user namespace, other findings would be redundant.
    if not unreadable and not is_in_user_namespace(access):
        findings.append(find_ksymbol_method(access))
        hidden = find_hidden_symbols(access)
        if hidden and hidden.level is Level.OK:
            findings = list(map(_tolerate_hidden, findings))
        findings += [hidden] if hidden else []
    if as_json:
        rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        verdict, causes = judge(findings)
        report = {"verdict": verdict, "causes": [cause.check for cause in causes], "findings": rows}
        click.echo(json.dumps(report, indent=1))
    else:
        say("\n".join([*describe(findings), "", *conclude(findings)]))
    sys.exit(_EXIT_HOST if any(f.level is Level.FAIL for f in findings) else 0)


def describe(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the text of each finding, omitting fixes that are printed elsewhere."""
    printed = {finding.fix for finding in findings if finding.level in (Level.WARN, Level.FAIL)}
    for finding in findings:
        yield _describe(finding, shows_fix=finding.fix not in printed)
        printed.add(finding.fix)


def _describe(finding: Finding, *, shows_fix: bool) -> str:
    text = f"{_MARKS[finding.level]}  {finding.check}: {finding.observed}"
    if finding.level is Level.OK:
        return text
    if finding.required:
        text += f"\n      needed: {finding.required}"
    if finding.fix and shows_fix:
        text += f"\n      fix: {finding.fix}"
    return text


def judge(findings: Sequence[Finding]) -> tuple[str, list[Finding]]:
    """Returns the verdict, and the findings that it is based on."""
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if failed:
        # Mention the sampler's failure to start only if no other check failed.
        return "does not work", [
            finding for finding in failed if finding.check != "sampler"
        ] or failed
    limits = [finding for finding in findings if finding.level is Level.WARN]
    return "works with limits" if limits else "works", limits


def conclude(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the verdict, then a line for each fix, naming the checks that require it."""
    verdict, causes = judge(findings)
    limits = [
        finding for finding in findings if finding.level is Level.WARN and finding not in causes
    ]
    yield f"{verdict}: {_name(causes)}" if causes else verdict
    fixes = defaultdict(list)
    for finding in (*causes, *limits):
        fixes[finding.fix].append(finding)
    for fix, concerned in fixes.items():
        yield f"  {_name(concerned)}: {fix}"


def _name(findings: Sequence[Finding]) -> str:
    return ", ".join(finding.check for finding in findings)


def _tolerate_hidden(finding: Finding) -> Finding:
    """Lowers a warning about hidden symbols to info level, because a BPF iterator can read them."""
    is_hidden = finding.check == "kernel symbols" and finding.level is Level.WARN
    return replace(finding, level=Level.INFO) if is_hidden else finding


class _Trial:
    """Runs the sampler for a fraction of a second, and collects findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(self) -> str:
        sampler = EbpfSampler(
            SamplerConfig(samples_per_second=99, stacks="both", send_idle_frames=True)
        )
        sampler.start()
        try:
            self.findings += _find_python_frames(sampler.python_problem)
            samples = []
            for _ in range(4):
                sampler.wait(0.1)
                samples += sampler.drain()
            cpus = len(sampler.cpus)
            sampler.stop()
            taken = len(samples) + len(sampler.drain())
            method = "unwind tables" if sampler.tables else "frame pointers"
            return (
                f"{describe_count(taken, 'sample')} on {describe_count(cpus, 'CPU')} in 0.4 s; "
                f"user stacks unwound by {method}"
            )
        finally:
            sampler.close()
            self.findings.append(_find_off_cpu())


def _find_off_cpu() -> Finding:
    check, required = "off-CPU time", "libbpf, and a kernel with BTF that accepts the programs"
    sampler = EbpfSampler(SamplerConfig(on_cpu=False, off_cpu=OffCpuConfig(samples_per_second=0)))
    try:
        sampler.start()
        sampler.wait(0.1)
        sampler.drain()
        processes = len(sampler.read_waits())
    except KProfilerError as error:
        fix = error.hint or "see docs/off-cpu.md; everything else works without it"
        return Finding(check, Level.INFO, str(error), required, fix)
    finally:
        sampler.close()
    return Finding(
        check,
        Level.OK,
        f"counted for {describe_count(processes, 'process', 'processes')}",
        required,
    )


def _find_speedups() -> Finding:
    check, required = "inner loops", "the C library of this package, for a lower CPU time"
    if library_problem is None:
        compiled = "; modules that run for each sample are compiled"
        text = "in C" + (compiled if has_compiled_modules() else "")
        return Finding(check, Level.OK, text, required)
    fix = "use CPython 3.11 or later on x86-64 or arm64, and unset KPROFILER_SPEEDUPS"
    return Finding(check, Level.INFO, f"in Python: {library_problem}", required, fix)


def _find_python_frames(problem: str | None) -> Iterator[Finding]:
    """Checks whether Python frames can be read from other processes and from this interpreter."""
    check = "Python frames"
    required = "libbpf, and a kernel with BTF that accepts the program"
    if problem:
        fix = "see docs/python.md; everything else works without them"
        yield Finding(check, Level.WARN, f"none: {problem}", required, fix)
        return
    yield Finding(check, Level.OK, "read by the BPF program", required)
    check = "this interpreter"
    required = "a build with verified frame offsets, to profile services that run it"
    try:
        open_own()
    except InterpreterRefused as refused:
        observed = f"no Python frames: {refused}"
        yield Finding(check, Level.INFO, observed, required, "use another build of CPython")
    else:
        version = platform.python_version()
        yield Finding(check, Level.OK, f"frame offsets of CPython {version} are verified", required)
