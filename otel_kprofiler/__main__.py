"""``python -m otel_kprofiler``."""

from otel_kprofiler.cli import main

main()
