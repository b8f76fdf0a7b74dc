"""Commands and options shown on the documentation pages exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from otel_kprofiler.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!m]*.md"))]  # not modules.md


def shown(page):
    """Yields the commands in a page's code blocks and code spans, without redirections or pipes."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:sh|console)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(otel-kprofiler [^`\n]+)`", text)
    for line in lines:
        if match := re.search(r"(?:^|/|sudo |\$ )(otel-kprofiler .*)", line):
            yield re.split(r" (?:[|>&;]|2>)", match[1])[0]


def parse(name, arguments):
    """Parses options and counts their values, but does not check values. Raises ``UsageError``."""
    command = cli.get_command(click.Context(cli), name)
    command.make_parser(click.Context(command)).parse_args(arguments)


CASES = sorted({(page.name, command) for page in PAGES for command in shown(page)})


@pytest.mark.parametrize(("page", "command"), CASES)
def test_every_documented_command_is_accepted(page, command):
    arguments = shlex.split(command, comments=True)[1:]
    while arguments and arguments[0].startswith("-"):
        arguments.pop(0)  # such as --version
    if not arguments:
        return
    name, *rest = arguments
    assert cli.get_command(click.Context(cli), name) is not None
    parse(name, rest)


def test_an_unknown_option_is_detected():
    with pytest.raises(click.NoSuchOption):
        parse("record", ["--no-such-option"])


def test_commands_in_documentation_pages_are_found():
    assert {page for page, _ in CASES} >= {"README.md", "coming-from.md", "report.md", "top.md"}
