"""Reads files as the agent does, in a child process whose memory usage a test can measure.

Arguments: a good file, a hostile file, a limit in MiB, how many times to read the hostile file, and
what to read (names or lines).
"""

import json
import logging
import os
import re
import sys
from pathlib import Path

from otel_kprofiler.host import Access, open_regular
from otel_kprofiler.model import FileDetails, FileId, FileKey
from otel_kprofiler.symbols.user.names import UserSymbolSettings, open_user_names
from tests.unit.symbols.user.hostile_files import TEXT


def peak_kib():
    """Returns this process's peak memory. ru_maxrss would include the parent's peak before exec."""
    match = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(match[1])


def main(good, hostile, limit, count, detail):
    reasons = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())
    logging.getLogger("otel_kprofiler").addHandler(handler)
    logging.getLogger("otel_kprofiler").setLevel(logging.INFO)
    names = open_user_names(UserSymbolSettings(detail=detail, max_bytes=int(limit) << 20))
    files = [good] + [hostile] * int(count)
    before = peak_kib()
    results = set()
    for number, path in enumerate(files):
        file = open_regular(Access(), path)
        names.add(FileKey(number, 8, 0), FileDetails(path, None, FileId(f"{number:032x}")), file)
        os.close(file.fd)
        names.finish(120)
        results.add(tuple(line.function for line in names.name(FileKey(0, 8, 0), TEXT).lines))
    report = {
        "before_kib": before,
        "peak_kib": peak_kib(),
        "good": list(results),
        "counts": names.counts()._asdict(),
        "reasons": reasons[-1:],
    }
    names.close()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
