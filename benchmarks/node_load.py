"""``python -m benchmarks.node_load SECONDS``: simulates the mostly idle services on a node.

Runs 30 Go programs and 20 C++ programs, each from a separate file, and 20 Python processes. Each
process is busy for a few milliseconds, three times a second.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peer_load import CPP

GO_PROGRAMS, CPP_PROGRAMS, PYTHONS = 30, 20, 20
GO = """
package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"time"
)

func serve(w http.ResponseWriter, r *http.Request) {
	values := map[string][]int{}
	for i := 0; i < 500; i++ {
		values[r.URL.Path] = append(values[r.URL.Path], i)
	}
	json.NewEncoder(w).Encode(values)
}

func main() {
	for {
		for i := 0; i < 20; i++ {
			serve(httptest.NewRecorder(), httptest.NewRequest("GET", "/orders", nil))
		}
		time.Sleep(300 * time.Millisecond)
	}
}
"""
PYTHON = """
import json, time
while True:
    for _ in range(5): json.loads(json.dumps([{"a": i, "b": str(i)} for i in range(200)]))
    time.sleep(0.3)
"""
_WAITING = "sink += Nest<12>::run(v); if (!(round & 63)) usleep(300000);"


def _build(folder: Path) -> Iterator[tuple[Path, int]]:
    """Builds the compiled programs, and yields each program's path and number of copies."""
    folder.joinpath("main.go").write_text(GO)
    folder.joinpath("service.cpp").write_text(
        "#include <unistd.h>\n" + CPP.replace("sink += Nest<12>::run(v);", _WAITING)
    )
    for name, copies, command in (
        ("go", GO_PROGRAMS, ["go", "build", "-o", "go", "main.go"]),
        ("cpp", CPP_PROGRAMS, ["g++", "-O2", "-pthread", "-o", "cpp", "service.cpp"]),
    ):
        if shutil.which(command[0]):
            subprocess.run(command, cwd=folder, check=True)
            yield folder / name, copies


@contextlib.contextmanager
def node_load() -> Iterator[None]:
    """Context manager that runs all services whose compiler is installed."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = Path(directory)
        commands = [["/usr/bin/python3", "-c", PYTHON]] * PYTHONS
        for program, copies in _build(folder):
            for number in range(copies):
                copy = folder / f"{program.name}-service-{number}"
                # Copies of different sizes have different file ids.
                copy.write_bytes(program.read_bytes() + bytes(number + 1))
                copy.chmod(0o755)
                commands.append([str(copy)])
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    with node_load():
        time.sleep(float(sys.argv[1]))
