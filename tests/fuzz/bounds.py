"""Parses crafted input in a child process with limited memory and time."""

import os
import resource
import traceback

from otel_kprofiler.errors import KProfilerError

READ, REFUSED, FAILED = 0, 3, 4


def read_within(read, *, mebibytes=512, seconds=60):
    """Returns the exit code of a forked child that calls ``read`` with limited extra memory."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = FAILED
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + (mebibytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds, int(used) + seconds))
        read()
        status = READ
    except KProfilerError:
        status = REFUSED
    except BaseException:  # noqa: BLE001 - reported to the parent, which judges it
        traceback.print_exc()
    finally:
        os._exit(status)
