"""``otel-kprofiler check``: validate OTLP profiles against the data model's rules."""

import sys

import click

from otel_kprofiler.cli.profiles import read_unpacked
from otel_kprofiler.cli.terminal import describe_count, say
from otel_kprofiler.otlp import Violation, check_payload
from otel_kprofiler.text import escape_controls


@click.command(name="check")
@click.argument("path", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the violations as JSON.")
def command(path: str, *, as_json: bool) -> None:
    """Check the OTLP profiles in FILE against the data model's rules.

    FILE contains one message, JSON lines, or length-prefixed messages, and may be compressed with
    gzip. If FILE is -, standard input is read. The exit status is 0 if every rule holds, and 1 if
    any rule is violated.
    """
    problems: list[str] = []
    data = read_unpacked(path, problems.append)
    violations = [Violation("parsable", "file", problem) for problem in problems]
    violations += check_payload(data)
    if as_json:
        import json  # noqa: PLC0415

        click.echo(json.dumps([violation._asdict() for violation in violations], indent=1))
    else:
        for violation in violations:
            line = f"{violation.rule}: {violation.where}: {violation.message}"
            say(escape_controls(line))
        outcome = describe_count(len(violations), "violation") if violations else "ok"
        say(f"{path}: {outcome}")
    sys.exit(1 if violations else 0)
