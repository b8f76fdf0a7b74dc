"""Generates manual pages from all help texts. ``python -m tests.man`` writes docs/man."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path

import click

from otel_kprofiler.cli.main import COMMANDS, cli
from otel_kprofiler.version import __version__

FOLDER = Path(__file__).parents[1] / "docs" / "man"
PROGRAM = "otel-kprofiler"
ABOUT = "kernel-first continuous profiler for OpenTelemetry"
MADE_WITH = f'.\\" Made by `make generated` with click {version("click")}.'
"""The first line of each page. The version of click affects the wording."""
EXIT_STATUS = {
    "0": "success",
    "1": "failure",
    "2": "wrong usage or an invalid configuration",
    "3": "this host cannot be profiled (see otel-kprofiler-doctor(1))",
}
_NOT_WRAPPED = "\b"


def pages() -> dict[str, str]:
    main = click.Context(cli, info_name=PROGRAM, **cli.context_settings)
    results = {f"{PROGRAM}.1": "\n".join(main_page(main)) + "\n"}
    for name, short in COMMANDS.items():
        command = cli.get_command(main, name)
        assert command is not None
        context = click.Context(command, main, info_name=name)
        results[f"{PROGRAM}-{name}.1"] = "\n".join(command_page(context, short)) + "\n"
    return results


def main_page(context: click.Context) -> Iterator[str]:
    yield from head(context, PROGRAM, ABOUT)
    yield ".SH COMMANDS"
    for name, short in COMMANDS.items():
        yield from [".TP", f".BR {escape(f'{PROGRAM}-{name}')} (1)", escape(short)]
    yield ".SH EXIT STATUS"
    for status, meaning in EXIT_STATUS.items():
        yield from [".TP", f".B {status}", escape(meaning)]
    yield from [".PP", "Commands with other exit statuses document them on their pages."]


def command_page(context: click.Context, short: str) -> Iterator[str]:
    yield from head(context, f"{PROGRAM}-{context.info_name}", short[0].lower() + short[1:-1])
    yield from [".SH SEE ALSO", f".BR {escape(PROGRAM)} (1)"]


def head(context: click.Context, name: str, short: str) -> Iterator[str]:
    """Yields the sections from NAME to OPTIONS."""
    command = context.command
    yield from [MADE_WITH, ".nh", ".ad l"]
    yield f'.TH {escape(name).upper()} 1 "" "{PROGRAM} {__version__}" "User Commands"'
    yield from [".SH NAME", f"{escape(name)} \\- {escape(short)}"]
    yield from [".SH SYNOPSIS", f".B {escape(context.command_path)}"]
    yield escape(" ".join(command.collect_usage_pieces(context)))
    yield ".SH DESCRIPTION"
    yield from paragraphs(cleandoc(command.help or ""))
    yield ".SH OPTIONS"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            yield from [".TP", names(record[0]), escape(record[1])]


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of help text. Preformatted paragraphs are unchanged."""
    for number, paragraph in enumerate(text.split("\n\n")):
        lines = paragraph.splitlines()
        if lines[0] == _NOT_WRAPPED:
            yield from [".PP", ".nf", *map(escape, lines[1:]), ".fi"]
        else:
            yield from [".PP"] * bool(number) + [escape(" ".join(lines))]


def names(text: str) -> str:
    return re.sub(r"(?<![\w-])(-[\w-]+)", lambda match: rf"\fB{escape(match[1])}\fR", text)


def escape(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    """Rewrites outdated pages, and deletes pages for commands that no longer exist."""
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for path in FOLDER.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
