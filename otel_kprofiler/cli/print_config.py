"""``otel-kprofiler print-config``: every key with the value that holds."""

from __future__ import annotations

import os

import click

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.config import dump_config, load_config


@click.command(name="print-config")
@click.option(
    "-c", "--config", "path", required=True, metavar="FILE", help="YAML configuration of the agent."
)
@click.option("--origins", is_flag=True, help="Say where each value was set.")
def command(path: str, *, origins: bool) -> None:
    """Print the configuration that holds, defaults included, without its secrets."""
    say(dump_config(load_config(path, environ=os.environ), origins=origins).removesuffix("\n"))
