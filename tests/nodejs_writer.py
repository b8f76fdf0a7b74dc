"""A Node.js 24 program that publishes its spans through ``@datadog/pprof``, installed with npm."""

import time

from tests import npm
from tests.thread_contexts import SOURCES

PROGRAM = SOURCES / "nodejs"
WRITERS = ("@datadog/pprof", "pprof-wrapped")
"""The current package, and a version with an extra object that points to the record."""


def command(writer, log, threads):
    place = npm.install(PROGRAM, "nodejs-writer")
    offset = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    words = [
        npm.node(place),
        "--expose-gc",
        PROGRAM / "program.mjs",
        place / "node_modules",
        writer,
        log,
        threads,
        offset,
    ]
    return list(map(str, words))
