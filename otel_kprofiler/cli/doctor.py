"""``otel-kprofiler doctor``: check whether this host can be profiled, and suggest fixes."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict

import click

from otel_kprofiler.bpf import BccLoader, LibbpfLoader
from otel_kprofiler.cli.terminal import say
from otel_kprofiler.host import Access, doctor, is_in_user_namespace
from otel_kprofiler.interpreters import InterpreterRefused, open_own
from otel_kprofiler.model import Finding, Level
from otel_kprofiler.sampling import EbpfSampler, SamplerConfig
from otel_kprofiler.tracking import find_hidden_symbols, find_ksymbol_method

_MARKS = {Level.OK: "ok  ", Level.INFO: "info", Level.WARN: "WARN", Level.FAIL: "FAIL"}
_EXIT_HOST = 3


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(*, as_json: bool) -> None:
    """Check whether you can profile this host, and how to fix it if not.

    Loads the real sampler for a moment. Exit status 0 if profiling works, 3 if not.
    """
    access = Access()
    loaders = {
        "libbpf.so.1": LibbpfLoader.is_installed(),
        "python3-bpfcc": BccLoader.is_installed(),
    }
    trial = _Trial()
    findings = doctor(access, loaders=loaders, try_sampler=trial.run)
    findings += trial.findings
    if not is_in_user_namespace(access):  # there, these findings only repeat that reason
        findings.append(find_ksymbol_method(access))
        hidden = find_hidden_symbols(access)
        findings += [hidden] if hidden else []
    if as_json:
        rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        click.echo(json.dumps(rows, indent=1))
    else:
        for finding in findings:
            say(describe(finding))
    sys.exit(_EXIT_HOST if any(f.level is Level.FAIL for f in findings) else 0)


def describe(finding: Finding) -> str:
    """Format a finding: one line, and up to two more with requirement and fix."""
    text = f"{_MARKS[finding.level]}  {finding.check}: {finding.observed}"
    if finding.level is Level.OK:
        return text
    if finding.required:
        text += f"\n      needed: {finding.required}"
    if finding.fix:
        text += f"\n      fix: {finding.fix}"
    return text


class _Trial:
    """Runs the sampler for a moment.

    Attributes:
        findings: what else it told, if it ran.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def run(self) -> str:
        """What it saw."""
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
            return f"{taken} samples on {cpus} CPUs in 0.4 s; user stacks by {method}"
        finally:
            sampler.close()


def _find_python_frames(problem: str | None) -> Iterator[Finding]:
    """Whether they can be read of other processes, and of services that run this interpreter."""
    check = "Python frames"
    required = "libbpf, and a kernel with BTF that accepts the program"
    if problem:
        fix = "see docs/python.md; everything else works without them"
        yield Finding(check, Level.WARN, f"none: {problem}", required, fix)
        return
    yield Finding(check, Level.OK, "the kernel's program reads them", required)
    check = "this interpreter"
    required = "one whose frames are proved, for services that run it"
    try:
        open_own()
    except InterpreterRefused as refused:
        observed = f"no Python frames: {refused}"
        yield Finding(check, Level.INFO, observed, required, "run services with another build")
    else:
        version = platform.python_version()
        yield Finding(check, Level.OK, f"frames of CPython {version} are proved", required)
