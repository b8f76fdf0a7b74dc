"""The command line: one module per command, imported on use."""

from otel_kprofiler.cli.main import main

__all__ = ["main"]
