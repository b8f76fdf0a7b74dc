"""Interpreter processes are detected from their mappings and from process events."""

import contextlib
import errno
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from otel_kprofiler.bpf import ProcessSeen, Program
from otel_kprofiler.host import (
    Access,
    FileProblem,
    MappedFileError,
    MemoryMapping,
    parse_mappings,
    read_maps,
)
from otel_kprofiler.interpreters import PythonProcesses, PythonTracking, Refusal, open_own
from otel_kprofiler.interpreters.files import InterpreterFiles
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.tracking import Exec, Exited, Mapped, Started, Unmapped
from tests.interpreters import Journal
from tests.waiting import wait_until

pytestmark = pytest.mark.system

CODE = MemoryMapping(0x7000, 0x9000, "r-xp", 0, 1, 2, "/lib/libpython.so", False)


PAST_ALL_PIDS = 1 << 22  # PID_MAX_LIMIT


class OwnFiles(Access):
    """Provides access to this host, and records the files opened for reading."""

    def __init__(self):
        super().__init__()
        self.read = []

    def open_fd(self, path):
        self.read.append(path)
        return super().open_fd(path)


def process(pid):
    return ProcessKey(pid, 1)


@pytest.fixture(scope="module")
def own():
    return open_own()


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def files():
    return OwnFiles()


@pytest.fixture
def processes(journal, files):
    return PythonProcesses(journal, files)


def own_code(own):
    return next(
        mapping
        for mapping in parse_mappings(read_maps(Access(), "self"))
        if mapping.is_executable and mapping.inode == own.file.inode
    )


def mapped(pid, own, start=0x7F0000000000):
    text = own.interpreter.texts[0]
    mapping = own_code(own)._replace(
        start=start, end=start + text.size, file_offset=text.offset & ~4095
    )
    return Mapped(1, process(pid), mapping, None)


def shift(own, start):
    """Returns the load bias of the interpreter, whose text is mapped at ``start``."""
    text = own.interpreter.texts[0]
    return start - (text.address - text.offset % 4096)


def test_a_process_is_registered_when_it_maps_an_interpreter(processes, journal, own):
    processes.apply(Started(1, process(5), 1))
    processes.apply(Mapped(1, process(5), CODE._replace(path="/bin/sh", inode=1), None))
    processes.apply(Mapped(1, process(5), CODE._replace(path="", inode=0), None))
    assert journal.now == {}
    processes.apply(mapped(5, own))
    layout, result = journal.now[5]
    assert layout == own.interpreter.layout
    assert result.runtime_at == own.interpreter.runtime + shift(own, 0x7F0000000000)
    assert result.code_type == own.interpreter.code_type + shift(own, 0x7F0000000000)
    assert result.eval_start == own.interpreter.eval_loop[0].start + shift(own, 0x7F0000000000)
    assert processes.counts().processes == 1


def test_a_sampled_process_is_registered_with_the_program_that_it_ran(processes, journal, own):
    processes.inspect(ProcessSeen(os.getpid(), 7))
    assert journal.all == [(os.getpid(), own.interpreter.layout, own.process, 7)]
    processes.inspect(ProcessSeen(os.getpid(), 8))
    assert [image for *_, image in journal.all] == [7, 8]
    processes.release_ended()
    assert list(journal.now) == [os.getpid()]


@pytest.fixture
def sleeping():
    with subprocess.Popen(["sleep", "100"]) as run:
        yield run.pid
        run.kill()


def test_a_process_that_execs_or_exits_is_released(processes, journal, own, sleeping):
    for pid in (PAST_ALL_PIDS, sleeping):
        processes.apply(mapped(pid, own))
        assert list(journal.now) == [pid]
        processes.inspect(ProcessSeen(pid, 7))
        assert journal.now == {}


def test_a_program_without_an_interpreter_is_skipped(processes, journal, sleeping):
    wait_until(lambda: b"nanosleep" in Path(f"/proc/{sleeping}/wchan").read_bytes())
    code = list(parse_mappings(read_maps(Access(), sleeping), only_code=True))
    file = next(one for one in code if one.path.endswith("/sleep"))
    pages = (
        sum(mapping.end - mapping.start for mapping in code if mapping.permissions == "r-xp")
        // mmap.PAGESIZE
    )
    program = Program(file.device, file.inode, pages)
    for other in (
        program._replace(code_pages=pages - 1),
        program._replace(inode=1),
        program._replace(device=1),
    ):
        processes.inspect(ProcessSeen(sleeping, 7, other))
    processes.inspect(ProcessSeen(PAST_ALL_PIDS, 7, program))
    assert not journal.passed_over, "it is not what was looked at"
    processes.inspect(ProcessSeen(sleeping, 7, program))
    assert journal.passed_over == [program]


def test_a_program_with_an_interpreter_is_not_skipped(processes, journal, own):
    code = own_code(own)
    pages = (code.end - code.start) // mmap.PAGESIZE
    processes.inspect(ProcessSeen(os.getpid(), 7, Program(code.device, code.inode, pages)))
    assert not journal.passed_over


def test_a_process_whose_file_could_not_be_read_is_examined_again(journal, own, monkeypatch):
    """A program is reported only once, so a temporary failure must not be final."""
    code = own_code(own)
    pages = (code.end - code.start) // mmap.PAGESIZE
    failures = [OSError(errno.EIO, "temporary"), MappedFileError(FileProblem.GONE)]
    read = InterpreterFiles._read

    def fail_first(self, pid, mapping, build_id):
        if mapping.path == code.path and failures:
            raise failures.pop()
        return read(self, pid, mapping, build_id)

    monkeypatch.setattr(InterpreterFiles, "_read", fail_first)
    monkeypatch.setattr("otel_kprofiler.interpreters.processes._FIRST_RETRY_S", 0.01)
    seen = ProcessSeen(os.getpid(), 1, Program(code.device, code.inode, pages))
    with contextlib.closing(PythonTracking(journal)) as tracking:
        journal.seen.append(seen)
        os.eventfd_write(journal.fileno(), 1)
        tracking.start()
        wait_until(lambda: os.getpid() in journal.now)
        counts = tracking.counts()
    assert not failures
    assert not journal.passed_over
    assert counts.refused == {Refusal.NOT_OPENED: 1}


def test_exited_processes_are_detected(processes, journal, own, sleeping):
    for pid in (PAST_ALL_PIDS, sleeping):
        processes.apply(mapped(pid, own))
    processes.release_ended()
    assert list(journal.now) == [sleeping]


def test_children_inherit_registration_until_they_exec(processes, journal, own):
    processes.apply(mapped(5, own))
    processes.apply(Started(1, process(6), 5))
    processes.apply(Started(1, process(7), 6))
    assert journal.now[6] == journal.now[7] == journal.now[5]
    processes.apply(Exec(1, process(7), "sh"))
    processes.apply(Exited(1, process(5)))
    assert list(journal.now) == [6]
    processes.apply(Started(1, process(8), 5))
    assert list(journal.now) == [6]


def test_a_process_is_registered_again_after_it_executes_a_new_program(processes, journal, own):
    processes.apply(mapped(5, own, 0x7F0000000000))
    before = journal.now[5]
    processes.apply(Exec(1, process(5), "python3"))
    assert journal.now == {}
    processes.apply(mapped(5, own, 0x7F1000000000))
    assert journal.now[5] != before


def test_a_process_that_unmaps_its_interpreter_is_released(processes, journal, own):
    event = mapped(5, own)
    processes.apply(event)
    processes.apply(Unmapped(1, process(5), CODE))
    assert list(journal.now) == [5]
    processes.apply(Unmapped(1, process(5), event.mapping))
    assert journal.now == {}


def test_processes_that_do_not_fit_in_the_map_are_counted(own):
    journal = Journal(room=1)
    processes = PythonProcesses(journal, Access())
    processes.apply(mapped(5, own))
    processes.apply(mapped(6, own))
    processes.apply(Exited(1, process(6)))
    assert list(journal.now) == [5]
    assert processes.counts().without_room == 1


def test_files_that_cannot_be_opened_are_counted_if_they_are_named_python(processes, own):
    gone = CODE._replace(path="/gone/python3.12")
    processes.apply(Mapped(1, process(5), gone, None))
    processes.apply(Mapped(1, process(5), gone._replace(path="/gone/libc.so"), None))
    assert processes.counts().as_dict() == {
        "processes": 0, "without_room": 0, "refused": {Refusal.NOT_OPENED.name.lower(): 1},
        "refused_processes": {Refusal.NOT_OPENED.name.lower(): 1},
    }  # fmt: skip


def test_each_process_is_counted_once_and_each_file_logged_once(processes, own, caplog):
    gone = CODE._replace(path="/gone/python3.12")
    for pid in (5, 5, 6):
        processes.apply(Mapped(1, process(pid), gone, None))
    assert processes.counts().refused_processes == {Refusal.NOT_OPENED: 2}
    assert caplog.text.count("no Python frames for /gone/python3.12") == 1


def test_each_interpreter_file_is_read_only_once(processes, files, own):
    event = mapped(5, own)
    small = CODE._replace(path="/bin/sh", inode=os.stat("/bin/sh").st_ino)
    processes.apply(event)
    processes.apply(Mapped(1, process(5), small, None))
    assert files.read
    files.read.clear()
    for pid in range(6, 20):
        processes.apply(event._replace(process=process(pid)))
        processes.apply(Mapped(1, process(pid), small, None))
    assert not files.read
