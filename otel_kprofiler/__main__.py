"""``python -m otel_kprofiler``."""

import os
import sys

# With -m the working directory comes first, and anybody may have put a json.py into it.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from otel_kprofiler.cli import main

main()
