"""Finds CPython in files and processes, and verifies the layout of its frames."""

from otel_kprofiler.interpreters.binary import Interpreter, find_interpreter
from otel_kprofiler.interpreters.layouts import Version, make_layout
from otel_kprofiler.interpreters.own import open_own
from otel_kprofiler.interpreters.processes import PythonCounts, PythonProcesses, PythonTracking
from otel_kprofiler.interpreters.refusal import InterpreterRefused, Refusal
