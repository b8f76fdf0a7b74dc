"""``otel-kprofiler validate``: check a configuration without starting the agent."""

import os

import click

from otel_kprofiler.cli.terminal import say
from otel_kprofiler.config import find_exposure, load_config


@click.command(name="validate")
@click.option(
    "-c", "--config", "path", required=True, metavar="FILE", help="The agent's YAML configuration."
)
def command(path: str) -> None:
    """Check a configuration, and print every problem with its line number.

    The exit status is 0 if the configuration is valid, and 2 if it is invalid.
    """
    exposure = find_exposure(load_config(path, environ=os.environ))
    if exposure:
        say(f"warning: {exposure}", err=True)
    say(f"{path}: ok")
