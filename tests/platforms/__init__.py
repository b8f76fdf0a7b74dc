"""Records on which platforms the profiler was seen to work, and writes docs/platforms.md."""
