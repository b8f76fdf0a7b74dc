"""A batch job with kernel profiles as its only OpenTelemetry signal.

    OTEL_SERVICE_NAME=copy OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4317 \
    python batch_job.py 200
"""  # noqa: D208 - the command is indented

import os
import sys
import tempfile

from otel_kprofiler import KernelProfiler


def copy_many(count: int) -> int:
    """Writes a file, copies it ``count`` times, and returns the number of bytes copied."""
    copied = 0
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(os.urandom(1 << 20))
        source.flush()
        for _ in range(count):
            copied += os.sendfile(target.fileno(), source.fileno(), 0, 1 << 20)
            os.ftruncate(target.fileno(), 0)
            os.lseek(target.fileno(), 0, os.SEEK_SET)
    return copied


if __name__ == "__main__":
    # Leaving the block exports pending samples.
    with KernelProfiler.from_env() as profiler:
        print(copy_many(int(sys.argv[1])), "bytes copied")
    print(profiler.stats()["samples"], "samples of the kernel")
