"""Finds CPython in files and processes, and verifies the layout of its frames."""

from otel_kprofiler.interpreters.binary import Interpreter, find_interpreter
from otel_kprofiler.interpreters.layouts import Version, make_layout, parse_version
from otel_kprofiler.interpreters.own import OwnInterpreter, open_own
from otel_kprofiler.interpreters.processes import (
    PythonCounts,
    PythonProcesses,
    PythonRegistry,
    PythonTracking,
)
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal

__all__ = [
    "Interpreter",
    "InterpreterRefused",
    "OwnInterpreter",
    "PythonCounts",
    "PythonProcesses",
    "PythonRegistry",
    "PythonTracking",
    "Refusal",
    "Version",
    "find_interpreter",
    "make_layout",
    "open_own",
    "parse_version",
]
