"""A worker process finds source lines in files with split or shared DWARF."""

import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest

from otel_kprofiler.errors import DependencyError
from otel_kprofiler.host import Access, open_regular
from otel_kprofiler.model import FileDetails, FileId, FileKey, Line
from otel_kprofiler.symbols.user import drgn_lines as module
from otel_kprofiler.symbols.user import line_tables
from otel_kprofiler.symbols.user.drgn_lines import DrgnLines, WorkerLimits
from otel_kprofiler.symbols.user.line_tables import LineTables
from otel_kprofiler.symbols.user.lines import SymbolicLines
from otel_kprofiler.symbols.user.lines_error import LinesError
from otel_kprofiler.symbols.user.names import UserSymbolSettings, open_user_names
from otel_kprofiler.symbols.user.symcache import SymCache
from tests.further import further
from tests.unit.symbols.user.elf_programs import tool

pytestmark = pytest.mark.system

CODE = """
static inline int leaf(int a) { return a * 3 + 1; }
static inline int middle(int a) {
  int sum = 0;
  for (int at = 0; at < a; at++) sum += leaf(sum ^ at);
  return sum;
}
#define OUTER(name) \\
  __attribute__((noinline)) int name(int a, int (*call)(int)) { \\
    return call(middle(a)) / (a + 7); \\
  }
OUTER(first)
OUTER(second)
int third(int a) {
  return middle(a + 1) +
         leaf(a);
}
int main(int count, char **words) { return first(count, third) + second(count + 1, third); }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Builds programs from the same source, with DWARF stored in different ways."""
    folder = tmp_path_factory.mktemp("drgn")
    (folder / "code.c").write_text(CODE)
    for name, options in {
        "whole": ["-gdwarf-5"],
        "split": ["-gdwarf-5", "-gsplit-dwarf"],
        "split4": ["-gdwarf-4", "-gsplit-dwarf", "-no-pie"],
        "packed": ["-gdwarf-4", "-gsplit-dwarf"],
    }.items():
        tool("gcc", "-O2", "-g", *options, "-o", name, "code.c", cwd=folder)
    tool("dwp", "-e", "packed", "-o", "packed.dwp", cwd=folder)
    (folder / "packed-code.dwo").unlink()
    for name in ("shared", "other"):
        (folder / name).write_bytes((folder / "whole").read_bytes())
    tool("dwz", "-m", "common", "shared", "other", cwd=folder)
    return folder


def text_range(path):
    rows = [line.split() for line in tool("readelf", "-SW", str(path)).splitlines()]
    start, size = next((row[-8], row[-6]) for row in rows if " .text " in f" {' '.join(row)} ")
    return int(start, 16), int(size, 16)


def places(table, address):
    return [(line.file, line.line) for line in table.lookup(address)]


@pytest.mark.parametrize("name", ["split", "packed", "shared", *further("split4")])
def test_lines_read_by_drgn_match_full_dwarf(name, folder, opened):
    alternate = opened(folder / "common") if name == "shared" else None
    source = opened(folder / name)
    table = LineTables(SymbolicLines(None)).open(source, str(folder / name), alternate)
    assert isinstance(table, DrgnLines)
    whole = SymbolicLines(None).open(opened(folder / "whole"))
    start, size = text_range(folder / "whole")
    shift = text_range(folder / name)[0] - start
    known = inlined = 0
    for address in range(start, start + size):
        expected = places(whole, address)
        if expected:
            known += 1
            found = table.lookup(address + shift)
            assert [(line.file, line.line) for line in found] == expected, hex(address)
            inlined += len(found) > 1
            assert all(line.function not in {"", "?"} for line in found)
    assert known > 80
    assert inlined > 20


def test_files_with_complete_dwarf_are_read_without_drgn(folder, opened):
    table = LineTables(SymbolicLines(None)).open(opened(folder / "whole"), "")
    assert isinstance(table, SymCache)
    assert not table.is_partial


def test_drgn_is_not_used_if_it_is_disabled(folder, opened):
    tables = LineTables(SymbolicLines(None), use_drgn=False)
    assert isinstance(tables.open(opened(folder / "split"), ""), SymCache)


@pytest.mark.parametrize("may_block", [False, True])
def test_the_agent_does_not_wait_for_drgn(may_block, folder, tmp_path, monkeypatch):
    opened = []

    def record(source, path, **_):
        opened.append(path)
        raise LinesError("not now")

    monkeypatch.setattr(line_tables, "DrgnLines", record)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, key = str(folder / "split"), FileKey(1, 8, 0)
    names = open_user_names(UserSymbolSettings(detail="lines", may_block=may_block))
    file = open_regular(Access(), path)
    names.add(key, FileDetails(path, None, FileId("1" * 32)), file)
    os.close(file.fd)
    names.finish(60)
    (start,) = (
        int(row.split()[0], 16) for row in tool("nm", path).splitlines() if row.endswith(" first")
    )
    assert [line.function for line in names.name(key, start).lines] == ["first"]
    names.close()
    assert opened == [path] * may_block


def test_source_lines_that_do_not_need_drgn_are_shown_without_drgn(folder, opened, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name != "drgn" or None)
    table = LineTables(SymbolicLines(None)).open(opened(folder / "shared"), "")
    assert isinstance(table, SymCache)
    assert table.is_partial
    start, size = text_range(folder / "whole")
    assert any(table.lookup(address) for address in range(start, start + size, 50))
    with pytest.raises(DependencyError) as caught:
        DrgnLines(opened(folder / "split"), "")
    assert "pip install 'otel-kprofiler[drgn]'" in caught.value.hint


@pytest.mark.parametrize(
    "answer", ["", "{", "1", "null", "[1]", "[[1]]", '[["f", "", null]]', '["abcd"]', "[" * 99_999]
)
def test_malformed_worker_responses_are_rejected(answer):
    with pytest.raises(ValueError):
        module.parse_answer(answer)


def test_a_worker_response_is_parsed():
    results = module.parse_answer('[["leaf", "a.c", 7], ["_Z3fooi.cold", "", 0]]')
    assert results == (Line("leaf", "", "a.c", 7), Line("foo(int)", "_Z3fooi.cold"))


def test_a_worker_that_exits_is_replaced(folder, opened):
    limits = WorkerLimits(idle_s=0.2)
    table = DrgnLines(opened(folder / "split"), str(folder / "split"), limits=limits)
    first = table._worker._child
    first.wait(60)  # exits without requests
    table._task = table._task._replace(idle_s=300.0)
    start, size = text_range(folder / "split")
    address = next(at for at in range(start, start + size) if table.lookup(at))
    expected = table.lookup(address)
    assert table._worker._child is not first

    def stop_worker():
        table._worker._limits = limits._replace(answer_s=1.0)  # only for this worker
        table._worker._child.send_signal(signal.SIGSTOP)

    for _ in range(2):
        stop_worker()
        started = time.monotonic()
        assert table.lookup(address) == expected  # resolved by the next worker
        assert time.monotonic() - started > 0.9
    stop_worker()
    assert table.lookup(address) == ()  # three workers have failed
    table.close()
    table.close()
    assert table.lookup(address) == ()


def test_a_response_that_arrived_while_the_process_was_paused_is_accepted(monkeypatch):
    receive, send = os.pipe()
    with open(receive, "rb", buffering=0) as output, open(send, "wb", buffering=0) as child:
        child.write(b"[]\n")
        worker = module._Worker.__new__(module._Worker)
        worker._child = SimpleNamespace(stdout=output)
        clock = SimpleNamespace(monotonic=itertools.count(0, 100).__next__)
        monkeypatch.setattr(module, "time", clock)
        assert worker._read(10.0) == "[]"
        with pytest.raises(LinesError, match="took over 10 s"):
            worker._read(10.0)


def test_a_drgn_worker_is_killed_when_its_table_is_deleted(folder, opened):
    table = DrgnLines(opened(folder / "split"), str(folder / "split"))
    child = table._worker._child
    del table
    assert child.wait(60) == -signal.SIGKILL


def test_files_without_dwarf_are_rejected(folder, opened, tmp_path):
    stripped = tmp_path / "stripped"
    tool("strip", "-o", str(stripped), str(folder / "whole"))
    for path in (stripped, folder / "code.c", "/dev/null"):
        with pytest.raises(LinesError, match="cannot be read"):
            DrgnLines(opened(path), str(path))
    with pytest.raises(LinesError, match=r"cannot be read|has exited"):
        DrgnLines(opened(folder / "split"), "", limits=WorkerLimits(memory_bytes=4 << 20))
