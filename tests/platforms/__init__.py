"""Records the platforms on which the profiler was tested, and writes docs/platforms.md."""
