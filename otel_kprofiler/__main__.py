"""Runs the command line: ``python -m otel_kprofiler``."""

import os
import sys

# With -m, sys.path begins with the working directory, which may contain another user's json.py.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from otel_kprofiler.cli import main

main()
