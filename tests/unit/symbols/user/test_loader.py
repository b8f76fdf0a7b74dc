"""Symbols for user-space binaries are loaded in the background."""

import os
import subprocess
import sys
import threading

import pytest

from otel_kprofiler.host.child_cpu import MeteredChild
from otel_kprofiler.host.patient_children import PatientChildren
from otel_kprofiler.model import (
    BuildId,
    FileDetails,
    FileId,
    FileKey,
    Line,
    OpenFile,
    ProcessKey,
    Unresolved,
)
from otel_kprofiler.symbols.user import loader as loader_module
from otel_kprofiler.symbols.user.budget import ReadingBudget
from otel_kprofiler.symbols.user.file import NO_FILE, NamedAddress
from otel_kprofiler.symbols.user.lines_error import LinesProblem
from otel_kprofiler.symbols.user.loader import SymbolLoader
from otel_kprofiler.symbols.user.loader_files import SymbolsRefused
from otel_kprofiler.symbols.user.reopening import WantedFile
from tests.fuse import mounted
from tests.waiting import wait_until


class Names:
    """A fake for a file's symbols, with names derived from the file's content."""

    nbytes = 100

    def __init__(self, text, lines_problem=None, can_retry_lines=False):
        self.text, self.lines_problem, self.can_retry_lines = text, lines_problem, can_retry_lines

    def name(self, svma):
        return NamedAddress((Line(f"{self.text}_{svma:x}"),), svma, None)


def key(number):
    return FileKey(number, 8, 0)


def details(number, build_id=None):
    return FileDetails(f"/lib/lib{number}.so", build_id, FileId(f"{number:032x}"))


def opened(file):
    status = os.fstat(file.fileno())
    return OpenFile(file.fileno(), status.st_size, status.st_mtime_ns)


@pytest.fixture
def make():
    made = []

    def make_loader(read=lambda details, content: Names(content.decode()), **settings):
        def read_file(details, content, _search):
            return read(details, content)

        made.append(SymbolLoader(read_file, **{"max_bytes": 1 << 20, "cpu_share": 1.0, **settings}))
        return made[-1]

    yield make_loader
    for one in made:
        one.close()


def add(loader, *numbers, content=b"f", owner=0):
    for number in numbers:
        loader.add(key(number), details(number), content, owner)


def read_after(go_on):
    """Returns a reader that waits until ``go_on`` is set."""

    def read(_details, content):
        assert go_on.wait(30)
        return Names(content.decode())

    return read


def function(loader, number, address=0x10):
    found = loader.name(key(number), address)
    return found.lines[0].function if found.lines else found.unresolved


def test_a_file_is_pending_until_it_is_read(make):
    go_on = threading.Event()
    loader = make(read_after(go_on))
    add(loader, 1, content=b"one")
    version = loader.version
    assert function(loader, 1) is Unresolved.SYMBOLS_PENDING
    assert loader.counts().pending == 1
    go_on.set()
    loader.finish(30)
    assert function(loader, 1) == "one_10"
    assert loader.version > version
    assert loader.counts()[:6] == (1, 0, 0, 0, 0, 0)


def test_identical_files_are_read_only_once(make):
    contents = []

    def read(_details, content):
        contents.append(content)
        return Names("same")

    loader = make(read)
    for number in range(5):
        loader.add(key(number), details(7, BuildId("aa" * 20)), b"same")
    loader.finish(30)
    assert {function(loader, number) for number in range(5)} == {"same_10"}
    assert contents == [b"same"]


@pytest.mark.parametrize(
    "common", [details(7), details(7, BuildId("aa" * 20))._replace(is_go=True)], ids=["none", "Go"]
)
def test_files_without_a_unique_build_id_are_not_assumed_identical(make, common):
    """A file's hash covers only the first and last 4 KiB of the file."""
    loader = make()
    for number, content in enumerate((b"one", b"two")):
        loader.add(key(number), common, content)
    loader.finish(30)
    assert [function(loader, number) for number in range(2)] == ["one_10", "two_10"]


def test_a_file_modified_while_it_is_being_read_yields_no_names(make, tmp_path):
    path = tmp_path / "lib.so"
    path.write_text("before")
    loader = make(lambda _details, content: Names(os.pread(content.fd, 100, 0).decode()))
    with open(path, "r+") as file:
        found = opened(file)
        file.write("after!")
        file.flush()
        os.utime(path, ns=(1, found.modified_ns + 1))
        loader.add(key(1), details(1), found)
    loader.finish(30)
    assert function(loader, 1) is Unresolved.SYMBOLS_REFUSED


def test_a_file_remains_readable_after_the_caller_closes_its_descriptor(make, tmp_path):
    path = tmp_path / "libdeleted.so"
    path.write_text("deleted")
    loader = make(lambda _details, content: Names(os.pread(content.fd, 100, 0).decode()))
    with open(path, "rb") as file:
        loader.add(key(1), details(1), opened(file))
        path.unlink()
    loader.finish(30)
    assert function(loader, 1) == "deleted_10"


def test_a_malformed_file_does_not_affect_other_files(make, caplog):
    def read(_details, content):
        if content == b"bad":
            raise SymbolsRefused("its section headers are damaged")
        if content == b"worse":
            raise ZeroDivisionError
        return Names("good")

    loader = make(read)
    for number, content in enumerate((b"bad", b"worse", b"good")):
        loader.add(key(number), details(number), content)
    loader.finish(30)
    assert [function(loader, number) for number in range(3)] == [
        Unresolved.SYMBOLS_REFUSED, Unresolved.SYMBOLS_REFUSED, "good_10",
    ]  # fmt: skip
    assert loader.counts().refused == 2
    assert "lib1.so failed" in caplog.text


def test_least_recently_used_tables_are_evicted_first(make):
    loader = make(max_bytes=350)
    add(loader, *range(3))
    loader.finish(30)
    for number in (0, 2):
        function(loader, number)
    add(loader, 3)
    loader.finish(30)
    assert [function(loader, number) for number in (0, 2, 3)] == ["f_10"] * 3
    assert (loader.counts().evicted, loader.counts().bytes) == (1, 300)
    assert function(loader, 1) is Unresolved.SYMBOLS_PENDING
    loader.finish(30)
    assert function(loader, 1) is Unresolved.SYMBOLS_DROPPED  # the file cannot be reopened
    assert (loader.counts().gone, loader.counts().refused, loader.counts().pending) == (1, 0, 0)


def test_a_missing_file_is_read_as_soon_as_it_can_be_opened(make):
    now_s, running = 0, {}
    loader = make(reopen=running.get, max_bytes=200, now_ns=lambda: now_s * 1_000_000_000)
    for number in range(3):
        add(loader, number, owner=number)
    loader.finish(30)
    (lost,) = [number for number in range(3) if isinstance(function(loader, number), Unresolved)]
    loader.finish(30)
    assert function(loader, lost) is Unresolved.SYMBOLS_DROPPED
    running[WantedFile(key(lost), details(lost), lost)] = b"again"
    assert function(loader, lost) is Unresolved.SYMBOLS_DROPPED, "it was looked for at each sample"
    now_s = 1000
    assert function(loader, lost) is Unresolved.SYMBOLS_PENDING
    loader.finish(30)
    assert function(loader, lost) == "again_10"


def test_a_file_dropped_by_a_full_queue_is_read_once_the_queue_has_space(make, monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_WAITING", 1)
    now_s, go_on = 0, threading.Event()
    loader = make(
        read_after(go_on), reopen=lambda _: b"later", now_ns=lambda: now_s * 1_000_000_000
    )
    add(loader, *range(4), content=b"first")
    go_on.set()
    loader.finish(30)
    dropped = [number for number in range(4) if isinstance(function(loader, number), Unresolved)]
    assert len(dropped) == loader.counts().dropped > 0
    for number in dropped:
        now_s += 1000
        assert function(loader, number) is Unresolved.SYMBOLS_PENDING
        loader.finish(30)
        assert function(loader, number) == "later_10"


class Stalled:
    """A loader with a settable clock, and a file whose source lines are temporarily unreadable."""

    def __init__(self, make, **settings):
        self.now_s, self.answers, self.readings = 0.0, False, 0
        self.loader = make(
            self._read, reopen=self._reopen, now_ns=lambda: int(self.now_s * 1e9), **settings
        )
        self.again, self.wait = b"again", lambda: True

    def add(self, number):
        add(self.loader, number, content=b"first")
        self.loader.finish(30)

    def name(self, number=1):
        named = self.loader.name(key(number), 0x10)
        self.loader.finish(30)
        return named.lines[0].function, named.is_interim

    def _read(self, _details, content):
        self.readings += 1
        problem = None if self.answers else LinesProblem.UNANSWERED
        return Names(content.decode(), problem, can_retry_lines=not self.answers)

    def _reopen(self, _):
        assert self.wait()
        if isinstance(self.again, Exception):
            raise self.again
        return self.again


def test_lines_are_read_as_soon_as_their_file_system_responds(make):
    stalled = Stalled(make)
    stalled.add(1)
    version = stalled.loader.version
    assert stalled.name() == ("first_10", True)
    stalled.answers = True
    stalled.now_s = 29
    assert [stalled.name() for _ in range(3)] == [("first_10", True)] * 3
    assert stalled.readings == 1, "it was read again at each sample"
    stalled.now_s = 31
    assert stalled.loader.version > version, "nobody asks for the names again"
    assert stalled.name() == ("first_10", True), "the functions are lost while it is reread"
    assert [stalled.name() for _ in range(3)] == [("again_10", False)] * 3
    assert stalled.readings == 2
    assert stalled.loader.counts().bytes == Names.nbytes


def test_files_on_an_unresponsive_file_system_are_retried_at_growing_intervals(make):
    stalled = Stalled(make)
    stalled.add(1)
    for _ in range(1000):
        stalled.now_s += 10
        assert stalled.name()[1]
    assert 10 < stalled.readings < 50
    assert stalled.loader.counts().lines_refused == {"unanswered": 1}


@pytest.mark.parametrize(
    ("again", "counted"), [(None, (1, 0)), (OSError(5, "Input/output error"), (0, 1))]
)
def test_a_file_that_fails_repeatedly_is_counted_only_once(make, again, counted):
    stalled = Stalled(make)
    stalled.again = again
    for number in (1, 2):
        stalled.add(number)
    for _ in range(5):
        stalled.now_s += 10_000
        stalled.name(1)
    counts = stalled.loader.counts()
    assert (counts.gone, counts.refused) == counted
    stalled.now_s += 10_000
    stalled.name(2)
    counts = stalled.loader.counts()
    assert counts.gone + counts.refused == 2
    assert counts.lines_refused == {"unanswered": 2}


@pytest.mark.parametrize("again", [None, OSError(5, "Input/output error")])
def test_function_names_are_kept_if_the_lines_of_a_file_cannot_be_read(make, again):
    stalled = Stalled(make)
    stalled.add(1)
    stalled.again, stalled.answers, stalled.now_s = again, True, 31
    assert [stalled.name() for _ in range(3)] == [("first_10", True)] * 3
    counts = stalled.loader.counts()
    assert (counts.gone + counts.refused, counts.pending, counts.bytes) == (1, 0, Names.nbytes)
    stalled.again, stalled.now_s = b"again", 1000
    stalled.name()
    assert stalled.name() == ("again_10", False)


def test_a_file_evicted_while_its_lines_are_read_is_reread_only_once(make):
    stalled, go_on = Stalled(make), threading.Event()
    stalled.add(1)
    stalled.answers, stalled.now_s, stalled.wait = True, 31, lambda: go_on.wait(30)
    assert stalled.loader.name(key(1), 0x10).is_interim
    with stalled.loader._changed:
        stalled.loader._evict(stalled.loader._keys[key(1)].file)
    assert function(stalled.loader, 1) is Unresolved.SYMBOLS_PENDING
    go_on.set()
    stalled.loader.finish(30)
    assert function(stalled.loader, 1) == "again_10"
    assert (stalled.readings, stalled.loader.counts().bytes) == (2, Names.nbytes)


def test_an_evicted_file_is_reopened_when_a_name_is_requested(make, tmp_path):
    path = tmp_path / "lib.so"
    path.write_text("again")

    def read(_details, content):
        return Names(content.decode() if isinstance(content, bytes) else "again")

    def reopen(found):
        fd = os.open(path, os.O_RDONLY)
        return OpenFile(fd, os.fstat(fd).st_size, os.fstat(fd).st_mtime_ns)

    loader = make(read, reopen=reopen, max_bytes=200)
    add(loader, *range(4), content=b"first")
    loader.finish(30)
    assert loader.counts().evicted == 2
    assert function(loader, 0) is Unresolved.SYMBOLS_PENDING
    loader.finish(30)
    assert function(loader, 0) == "again_10"


def test_tables_that_evict_each_other_are_reloaded_at_growing_intervals(make):
    now_s = 0.0
    loader = make(reopen=lambda _: b"f", max_bytes=250, now_ns=lambda: int(now_s * 1e9))
    add(loader, *range(3))
    loader.finish(30)
    for _ in range(600):
        now_s += 0.1
        for number in range(3):
            function(loader, number)
            loader.finish(30)
    assert 6 < loader.counts().loaded < 30
    (last,) = [number for number in range(3) if isinstance(function(loader, number), Unresolved)]
    now_s += 1000
    function(loader, last)
    loader.finish(30)
    assert function(loader, last) == "f_10"


def test_a_table_that_would_evict_most_other_tables_is_rejected(make, caplog):
    caplog.set_level("INFO")
    loader = make(max_bytes=199)
    add(loader, 1, content=b"large")
    loader.finish(30)
    assert function(loader, 1) is Unresolved.SYMBOLS_REFUSED
    assert "more than half of the" in caplog.text


def test_an_evicted_file_is_read_again_when_it_is_added_again(make):
    loader = make(max_bytes=200)
    for number in (0, 1, 2, 0):
        add(loader, number)
        loader.finish(30)
        assert function(loader, number) == "f_10"


def test_files_beyond_the_queue_limit_are_dropped_and_counted(make, monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_WAITING", 2)
    go_on = threading.Event()
    loader = make(read_after(go_on))
    add(loader, *range(10))
    dropped = loader.counts().dropped
    assert dropped in {7, 8}  # the thread may have dequeued a file
    go_on.set()
    loader.finish(30)
    named = [number for number in range(10) if function(loader, number) == "f_10"]
    assert len(named) == 10 - dropped


class MadeCode:
    """A stub for code that is not in a file and whose names are read once."""

    def __init__(self):
        self.has_work, self.was_read = True, threading.Event()

    def name(self, _process, _address, _at_ns):
        return NO_FILE, self.has_work

    def read_one(self):
        self.has_work = False
        self.was_read.set()

    def close(self):
        pass


def test_code_without_a_file_remains_queued_when_files_are_dropped(make, monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_WAITING", 1)
    go_on, code = threading.Event(), MadeCode()
    loader = make(read_after(go_on), code=code)
    for number in range(3):
        add(loader, number, owner=number)
    loader.name_code(None, 0, 0)
    go_on.set()
    assert code.was_read.wait(30)


def test_files_for_different_processes_are_read_alternately(make):
    go_on, order = threading.Event(), []

    def read(file, _content):
        assert go_on.wait(30)
        order.append(file.path)
        return Names("f")

    loader = make(read)
    add(loader, *range(20), owner=1)
    add(loader, 99, owner=2)
    go_on.set()
    loader.finish(30)
    assert order.index(details(99).path) <= 2, "the thread may have taken one before"


@pytest.mark.system
def test_files_for_other_processes_are_read_before_those_for_a_slow_process(make):
    go_on, order, children = threading.Event(), [], PatientChildren()
    burns = "import time\nwhile time.process_time() < 0.2: pass"

    def read(file, content):
        assert go_on.wait(30)
        if content == b"slow":
            child = MeteredChild([sys.executable, "-c", burns], stdout=subprocess.PIPE)
            children.wait(child, 1, 300)
        order.append(file.path)
        return Names("f")

    loader = make(read, cpu_ns=lambda: 0)  # only children use CPU time
    add(loader, 0, content=b"slow", owner=1)
    add(loader, 1, 2, 3, owner=1)
    add(loader, 11, 12, 13, owner=2)
    go_on.set()
    loader.finish(300)
    assert order == [details(number).path for number in (0, 11, 12, 13, 1, 2, 3)]


@pytest.mark.parametrize(
    ("owners", "other"),
    [([1] * 10, 2), ([2**30 + number for number in range(10)], os.getpid())],  # nonexistent pids
    ids=["of a process", "of a user with many processes"],
)
def test_a_flood_of_files_does_not_crowd_out_other_processes(make, monkeypatch, owners, other):
    monkeypatch.setattr(loader_module, "MAX_WAITING", 4)
    go_on = threading.Event()
    loader = make(read_after(go_on))
    for number, owner in enumerate(owners):
        add(loader, number, owner=owner)
    add(loader, 99, owner=other)
    go_on.set()
    loader.finish(30)
    assert function(loader, 99) == "f_10"
    assert loader.counts().dropped in {6, 7}


def test_loading_symbols_stays_within_the_cpu_budget_until_shutdown(make):
    spent_ns = 0

    def read(_details, _content):
        nonlocal spent_ns
        spent_ns += 30_000_000
        return Names("f")

    loader = make(read, cpu_share=1e-9, now_ns=lambda: 0, cpu_ns=lambda: spent_ns)
    add(loader, *range(60))
    with loader._changed:
        # an initial burst may use one second of CPU time
        loader._changed.wait_for(lambda: loader._loaded == 34, 60)
    assert loader.counts()[:6] == (34, 0, 0, 0, 0, 26)
    loader.finish(60)
    assert loader.counts()[:6] == (60, 0, 0, 0, 0, 0)


@pytest.mark.system
def test_closing_the_loader_closes_every_descriptor(make, tmp_path):
    go_on = threading.Event()

    def read(_details, _content):
        go_on.wait(1)
        return Names("f")

    loader = make(read)
    before = set(os.listdir("/proc/self/fd"))
    with open(tmp_path / "f", "wb") as file:
        for number in range(20):
            loader.add(key(number), details(number), opened(file))
    loader.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    add(loader, 99, content=b"late")
    assert function(loader, 99) is Unresolved.SYMBOLS_DROPPED


@pytest.mark.system
def test_a_forked_child_closes_the_inherited_files(make, tmp_path):
    def read(_details, _content):
        threading.Event().wait(0.2)
        return Names("f")

    loader = make(read)
    path = tmp_path / "f"
    with path.open("wb") as file:
        for number in range(8):
            loader.add(key(number), details(number), opened(file))
    child = os.fork()
    if child == 0:
        held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        os._exit(held.count(str(path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.finish(30)
    assert loader.counts().loaded == 8


def test_code_that_is_not_mapped_from_a_file_has_no_name(make):
    assert make().name_code(ProcessKey(1, 1), 0x1000, 1).unresolved is Unresolved.NO_FILE


def test_reading_files_evicts_large_tables_but_not_small_tables(make):
    budget = ReadingBudget(300)
    sizes = {0: 20, 1: 180, 2: 20}

    def read(_details, content):
        number = int(content)
        names = Names(f"f{number}")
        names.nbytes = sizes.get(number, 20)
        if number == 3:
            with budget.reading():
                budget.take(300, "it")
                held.append(loader.counts().bytes)
        return names

    held = []
    loader = make(read, budget=budget, max_bytes=400)
    for number in range(4):
        loader.add(key(number), details(number), b"%d" % number)
        loader.finish(30)
        function(loader, number)
    assert held == [40]
    assert [function(loader, number) for number in (0, 2, 3)] == ["f0_10", "f2_10", "f3_10"]


@pytest.mark.system
def test_evicted_files_on_a_hanging_device_do_not_delay_other_files(make, tmp_path):
    """The number of files exceeds the number of threads that the loader can abandon."""
    count = 34
    with mounted(tmp_path / "fuse", {f"f{number}": b"content" for number in range(count)}) as fuse:

        def reopen(file):
            return (fuse.point / f"f{file.key.inode}").read_bytes()

        loader = make(max_bytes=3 * Names.nbytes, reopen=reopen)
        add(loader, *range(count), content=b"content")
        loader.finish(30)
        fuse.freeze("open")
        for number in range(count):
            loader.name(key(number), 0x10)
        other = FileKey(1000, 9, 0)
        loader.add(other, details(1000), b"content")
        wait_until(lambda: loader.name(other, 0x10).lines)
        fuse.thaw()
