"""``otel-kprofiler print-config``: print every key with its effective value."""

import os

import click

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.config import dump_config, load_config


@click.command(name="print-config")
@click.option(
    "-c", "--config", "path", required=True, metavar="FILE", help="The agent's YAML configuration."
)
@click.option("--origins", is_flag=True, help="Show where each value was set.")
def command(path: str, *, origins: bool) -> None:
    """Print the effective configuration, including defaults but without secrets."""
    say(dump_config(load_config(path, environ=os.environ), origins=origins).removesuffix("\n"))
