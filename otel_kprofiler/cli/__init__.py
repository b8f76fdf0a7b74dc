"""The command line: one file per command, loaded only when it is called."""

from otel_kprofiler.cli.main import main

__all__ = ["main"]
