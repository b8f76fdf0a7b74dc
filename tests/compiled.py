"""Compares the requests that the compiled package encodes with those that its sources encode.

``python -m tests.compiled PYTHON`` records the workload of :mod:`benchmarks.peer`, and replays the
recording in this interpreter and in ``PYTHON``, an interpreter with the compiled wheel.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bench_replay import record

SECONDS = 10
REPLAY = """
import contextlib, hashlib, os, sys
from otel_kprofiler.model import AttributeForm, Form
from otel_kprofiler.otlp import encode, encode_window
from otel_kprofiler.pipeline import WindowSchedule, replay
from otel_kprofiler.recording import Recording

os.urandom = bytes  # makes all ids zero
digest, counts = hashlib.sha256(), []

def take(window):
    counts.append(window.sample_count)
    for form in Form:
        for attributes in AttributeForm:
            for limit in (None, 100_000):
                encoded = encode_window(
                    window, form=form, attributes=attributes, max_bytes=limit, new_id=os.urandom
                )
                for batch in encoded.batches:
                    digest.update(batch.payload)

with contextlib.closing(Recording(sys.argv[1])) as recording:
    replay(recording, WindowSchedule(10**9), take)
print(encode.__file__.rpartition(".")[2], sum(counts), digest.hexdigest())
"""


def replayed(python: str, path: Path) -> list[str]:
    """Returns the module's suffix (py or so), the sample count, and a digest of the requests."""
    command = [python, "-c", REPLAY, path]
    return subprocess.run(command, cwd="/", check=True, stdout=-1, text=True).stdout.split()


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "load.raw")
        record(str(path), SECONDS)
        ours, theirs = replayed(sys.executable, path), replayed(python, path)
    print(*ours, *theirs)  # noqa: T201 - shows the counts
    if (ours[0], theirs[0]) != ("py", "so"):
        sys.exit("compare the sources with the compiled form")
    if ours[1:] != theirs[1:] or ours[1] == "0":
        sys.exit("the requests differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
