"""Finds the parameters that were given on the command line."""

from collections.abc import Iterator

import click
from click.core import ParameterSource


def named_parameters() -> Iterator[click.Parameter]:
    """Yields the current command's parameters that were given on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE:
            yield parameter
