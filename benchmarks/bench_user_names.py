"""Measures the fraction of user frames that are named, for a mixed load and a gunicorn service."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.bench_agent import mixed_load
from benchmarks.rows import Row
from otel_kprofiler.elf import FileSource, read_elf, read_sections
from otel_kprofiler.host import Access, parse_mappings
from otel_kprofiler.model import USER_SIDE, BuildId, Frame, ModuleKind
from otel_kprofiler.otlp import read_profiles
from otel_kprofiler.symbols.user.debug_files import BuildIdDirectories, want_debug_file

RATE = 199
SERVICE = """
import hashlib, json, re, sqlite3, zlib

def app(environ, start_response):
    rows = [{"id": i, "name": f"item {i}", "price": i * 1.5} for i in range(300)]
    text = json.dumps(rows)
    base = sqlite3.connect(":memory:")
    base.execute("create table items(number, name)")
    base.executemany("insert into items values(?, ?)", [(i, str(i)) for i in range(300)])
    found = base.execute("select number % 7, max(name) from items group by 1 order by 2").fetchall()
    base.close()
    body = zlib.compress(json.dumps([found, json.loads(text)]).encode())
    words = re.findall(r'"(\\w+)": "', text)
    digest = hashlib.sha256(body).hexdigest() + str(len(words))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [digest.encode()]
"""
_SHT_SYMTAB = 2


@contextlib.contextmanager
def service(_: float) -> Iterator[list[int]]:
    """Runs a service with two workers under continuous requests, and yields its process ids."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as own:
        Path(directory, "service.py").write_text(SERVICE)
        port = own.getsockname()[1]
        own.set_inheritable(True)
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--workers", "2", "--chdir", directory),
                *("--bind", f"fd://{own.fileno()}", "--log-level", "warning", "service:app"),
            ],
            pass_fds=[own.fileno()],
        )
        stop = threading.Event()
        client = threading.Thread(target=_ask, args=(port, stop))
        client.start()
        try:
            time.sleep(3)  # until the workers have started
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            yield [server.pid, *map(int, children.split())]
            assert server.poll() is None, "gunicorn has ended"
        finally:
            stop.set()
            server.terminate()
            server.wait()
            client.join()


def _ask(port: int, stop: threading.Event) -> None:
    while not stop.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        # The server may be starting or stopping.
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse().read()
        connection.close()


def record(seconds: float, pids: list[int]) -> list[tuple[Frame, int]]:
    """Runs ``record`` for ``pids`` (empty: the whole host); returns user frames and weights."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "profile.otlp")
        command = [sys.executable, "-m", "otel_kprofiler", "record", "--stacks", "both"]
        options = ["-F", str(RATE), "-d", f"{seconds}s", "-o", path, *(f"-p{pid}" for pid in pids)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        return [
            (frame, sample.weight)
            for window in read_profiles(path)
            for _, sample in window.samples
            for frame in sample.stack.frames
            if frame.side is USER_SIDE
        ]


def files_with_symbols() -> set[BuildId]:
    """Returns the build ids of mapped files that have ``.symtab`` or a debug file."""
    paths = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mappings = parse_mappings(maps.read_bytes())
            paths |= {
                mapping.path for mapping in mappings if "x" in mapping.permissions and mapping.inode
            }
    return {result for result in map(_find_symbols, sorted(paths)) if result}


def _find_symbols(path: str) -> BuildId | None:
    """Returns a file's build id if the file has ``.symtab`` or a debug file, else None."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        source = FileSource(file.fileno(), os.fstat(file.fileno()).st_size)
        elf = read_elf(source)
        if any(section.kind == _SHT_SYMTAB for section in read_sections(source, elf)):
            return elf.build_id
        for debug in BuildIdDirectories(Access()).find(want_debug_file(source, elf, path)):
            debug.close()
            return elf.build_id
    return None


Load = Callable[[float], contextlib.AbstractContextManager[list[int] | None]]
LOADS: dict[str, Load] = {"mixed load": mixed_load, "gunicorn": service}


def rows(quick: bool) -> Iterator[Row]:
    seconds = 5.0 if quick else 15.0
    for name, load in LOADS.items():
        with load(seconds + 20) as pids:
            frames = record(seconds, pids or [])
            complete = files_with_symbols()
        total = named = known = known_named = 0
        why: Counter[str] = Counter()
        for frame, weight in frames:
            total += weight
            module = frame.module
            has_symbols = module is not None and module.build_id in complete
            known += weight * has_symbols
            if frame.lines:
                named += weight
                known_named += weight * has_symbols
            else:
                reason = frame.unresolved.name if frame.unresolved else "no reason"
                file = module.name if module and module.kind is ModuleKind.USER else "no file"
                why[f"{file} {reason}"] += weight
        assert total, name
        most = ", ".join(f"{reason} {count / total:.2%}" for reason, count in why.most_common(4))
        yield Row(f"user frames with a name, {name}", f"{named / total:.2%} of {total}", most)
        yield Row(
            f"of files with .symtab, {name}",
            f"{known_named / known:.2%} of {known}" if known else "none",
            goal=">= 95 %",
        )
        missing = sum(count for reason, count in why.items() if reason.endswith("no reason"))
        yield Row(f"frames with neither name nor reason, {name}", f"{missing}", goal="0")
