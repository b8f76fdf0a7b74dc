"""Files mapped by real processes are opened regardless of what has happened to their paths."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import unwind_maps
from unwind_maps import WAITS, compile_c, device_number, mapped_request, request_of

from otel_kprofiler.host import Access, FilePlaces, FileProblem, MappedFileError, open_mapped
from otel_kprofiler.model import KnownFiles
from otel_kprofiler.unwinding.loading import open_code
from otel_kprofiler.unwinding.refusal import Refusal, TableRefused
from tests.public import as_nobody

pytestmark = pytest.mark.live


class Without(Access):
    """An ``Access`` whose calls fail as if this process lacked some capabilities."""

    def __init__(self, *routes):
        super().__init__()
        self.routes = routes

    def open_reference(self, path):
        if any(f"/{route}" in path for route in self.routes):
            raise PermissionError(1, "Operation not permitted", path)
        return super().open_reference(path)


@contextmanager
def running(*command):
    with unwind_maps.running(*command) as process:
        yield process.pid


@pytest.fixture
def program(tmp_path):
    return compile_c(tmp_path / "waits", WAITS)


def wanted(pid, path):
    status = os.stat(path)
    return mapped_request(pid, status.st_ino, device_number(status.st_dev), status.st_size)


def opened(request, files, **known):
    file = open_mapped(request, files, **known)
    try:
        assert os.fstat(file.fd).st_ino == request.key.inode
        assert os.pread(file.fd, 4, 0) == b"\x7fELF"
        assert not file.content.has_changed()
        return file.route, file.path, file.deleted
    finally:
        file.close()


def refused(request, files, **known):
    with pytest.raises(MappedFileError) as caught:
        open_mapped(request, files, **known)
    return caught.value.problem


@pytest.mark.parametrize(
    ("missing", "route"),
    [
        ((), "map_files"),
        (("map_files",), "exe"),
        (("map_files", "exe"), "root"),
        (("map_files", "exe", "root"), "path"),
    ],
)
def test_files_are_opened_with_the_least_privilege_that_suffices(program, missing, route):
    with running(program) as pid:
        result = opened(wanted(pid, program), Without(*missing))
    assert result == (route, str(program), False)


def test_a_deleted_program_is_opened_through_map_files_or_exe(program):
    with running(program) as pid:
        request = wanted(pid, program)
        program.unlink()
        assert opened(request, Access()) == ("map_files", str(program), True)
        assert opened(request, Without("map_files")) == ("exe", str(program), True)
        assert refused(request, Without("map_files", "exe")) is FileProblem.FORBIDDEN


def test_a_file_that_replaces_a_mapped_file_is_not_opened(program, tmp_path):
    other = compile_c(tmp_path / "other", WAITS, "-O2")
    with running(program) as pid:
        request = wanted(pid, program)
        other.replace(program)
        assert refused(request, Without("map_files", "exe")) is FileProblem.FORBIDDEN
        assert opened(request, Access()) == ("map_files", str(program), True)


def test_a_mapping_replaced_by_another_file_is_reported_as_gone(program, tmp_path):
    """Libraries loaded in succession are often mapped at the same address."""
    other = compile_c(tmp_path / "other", WAITS, "-O2")
    with running(program) as pid, running(other):
        request = wanted(pid, program)
        earlier = request._replace(key=request.key._replace(inode=os.stat(other).st_ino))
        assert refused(earlier, Access()) is FileProblem.GONE


def test_a_file_with_a_different_size_or_modification_time_is_not_opened(program):
    """Inode number and size do not identify a file: file systems may reuse inode numbers."""
    with running(program) as pid:
        request = wanted(pid, program)
        assert opened(request, Access())[0] == "map_files"
        for change in ({"size": 1}, {"modified": request.modified + 1}):
            assert refused(request._replace(**change), Access()) is FileProblem.NOT_SAME


def test_the_executable_of_a_memfd_program_is_opened(program):
    code = (
        "import os, sys; fd = os.memfd_create('held'); "
        "os.sendfile(fd, os.open(sys.argv[1], os.O_RDONLY), 0, 1 << 20); os.execve(fd, ['x'], {})"
    )
    with running("python3", "-c", code, program) as pid:
        request = wanted(pid, f"/proc/{pid}/exe")
        assert opened(request, Access()) == ("map_files", "/memfd:held", True)


def test_a_file_mapped_in_a_chroot_is_opened(tmp_path):
    program = compile_c(tmp_path / "waits", WAITS, "-static")
    with running("chroot", tmp_path, "/waits") as pid:
        request = wanted(pid, program)
        # The kernel shows the path as seen from this process's root.
        assert opened(request, Access()) == ("map_files", str(program), False)
        assert opened(request, Without("map_files", "exe")) == ("path", str(program), False)


def test_a_file_that_exists_only_in_another_mount_namespace_is_opened(tmp_path):
    program = compile_c(tmp_path / "waits", WAITS, "-static")
    inside = tmp_path / "inside"
    inside.mkdir()
    script = f"mount -t tmpfs held {inside} && cp {program} {inside}/ && exec {inside}/waits"
    with running("unshare", "--mount", "sh", "-c", script) as pid:
        request = wanted(pid, f"/proc/{pid}/exe")
        assert not (inside / "waits").exists()
        assert opened(request, Access())[0] == "map_files"
        assert opened(request, Without("map_files", "exe"))[0] == "root"


def test_a_file_is_opened_after_the_thread_group_leader_has_exited(tmp_path):
    source = """
        #include <pthread.h>
        #include <unistd.h>
        static pthread_t leader;
        static void *stay(void *unused)
        {
            pthread_join(leader, 0);
            write(1, "\\n", 1);
            for (;;)
                pause();
        }
        int main(void)
        {
            pthread_t thread;
            leader = pthread_self();
            pthread_create(&thread, 0, stay, 0);
            pthread_exit(0);
        }
    """
    program = compile_c(tmp_path / "threads", source, "-pthread")
    with running(program) as pid:
        (tid,) = [int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid]
        request = wanted(tid, program)._replace(tgid=pid)
        assert opened(request, Access()) == ("map_files", str(program), False)


def test_a_file_is_opened_even_if_its_mapping_has_been_split(program):
    with running(program) as pid:
        request = wanted(pid, program)
        moved = request._replace(start=request.start - 4096)
        assert opened(moved, Access()) == ("map_files", str(program), False)


def test_an_exited_process_is_reported_as_gone(program):
    with running(program) as pid:
        request = wanted(pid, program)
    assert refused(request, Access()) is FileProblem.GONE
    assert opened(request, Access(), known_path=str(program)) == ("path", str(program), False)


def test_an_exited_process_does_not_affect_other_processes_files(program):
    places = FilePlaces()
    with running(program) as pid:
        request = wanted(pid, program)
        refused(request._replace(tgid=2**22, tid=2**22), Access(), find_places=places.find)
    places.add(str(program.parent / "another"))
    assert opened(request, Access(), find_places=places.find) == ("path", str(program), False)
    for other in (
        request._replace(size=request.size + 1),
        request._replace(modified=request.modified + 1),
        request._replace(key=request.key._replace(device=request.key.device + 1)),
        request._replace(size=0),
        request._replace(modified=0),
    ):
        assert refused(other, Access(), find_places=places.find) is FileProblem.GONE


def test_details_of_an_overwritten_file_are_discarded(program):
    """Otherwise, the file's build id would be read from the new content."""
    request, known = request_of(program), KnownFiles()
    places = FilePlaces([program.parent])

    class Overwritten(Access):
        def open_fd(self, path):
            fd = super().open_fd(path)
            program.write_bytes(program.read_bytes())
            os.utime(program, ns=(0, 0))  # because file timestamps may have a low resolution
            return fd

    files = Overwritten()
    with pytest.raises(TableRefused) as caught:
        open_code(request, files, known, places)
    assert caught.value.refusal is Refusal.CHANGED
    assert known.get(request.key) is None


def test_only_regular_files_are_opened(tmp_path):
    """A path may have been replaced by a device, and opening a device can have side effects."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    problem = refused(request_of(pipe), Access(), known_path=str(pipe))  # reading it would block
    assert problem is FileProblem.NOT_SAME


@pytest.fixture
def overlay(tmp_path):
    for name in ("low", "other", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "held", tmp_path / "other"], check=True)
    try:
        compile_c(tmp_path / "low" / "first", WAITS)
        compile_c(tmp_path / "other" / "second", WAITS)
        layers = f"lowerdir={tmp_path}/low:{tmp_path}/other"
        writable = f"upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        target = tmp_path / "merged"
        subprocess.run(
            ["mount", "-t", "overlay", "held", "-o", f"{layers},{writable}", target], check=True
        )
        try:
            yield tmp_path
        finally:
            subprocess.run(["umount", target], check=True)
    finally:
        subprocess.run(["umount", tmp_path / "other"], check=True)


@pytest.mark.parametrize(
    ("name", "layer"), [("first", "low"), ("second", "other"), ("third", "upper")]
)
def test_overlay_files_are_opened_by_their_inode_in_the_underlying_layer(overlay, name, layer):
    """The kernel's mapping refers to the layer's file, but stat reports the overlay's device."""
    merged = overlay / "merged" / name
    if not merged.exists():
        shutil.copy(overlay / "low" / "first", merged)
    below = overlay / layer / name
    assert os.stat(merged).st_dev != os.stat(below).st_dev
    with running(merged) as pid:
        request = wanted(pid, below)
        assert opened(request, Access()) == ("map_files", str(merged), False)
        assert opened(request, Without("map_files", "exe")) == ("root", str(merged), False)
        unknown = request._replace(size=0)
        assert opened(unknown, Access())[0] == "map_files"
        assert refused(unknown, Without("map_files", "exe")) is FileProblem.FORBIDDEN


def opened_as_nobody(python, request, *capabilities):
    """Opens a file as an unprivileged user with ``capabilities``; returns the route or error."""
    code = (
        "import sys\n"
        "from otel_kprofiler.model import FileKey\n"
        "from otel_kprofiler.host import Access, FileRequest, MappedFileError, open_mapped\n"
        "request = FileRequest(FileKey(*eval(sys.argv[1])), *eval(sys.argv[2]))\n"
        "try: print(open_mapped(request, Access()).route)\n"
        "except MappedFileError as error: print(error.problem.name)"
    )
    arguments = [repr(tuple(request.key)), repr(tuple(request[1:]))]
    command = [*as_nobody(*capabilities), python.command, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert not done.stderr
    return done.stdout.strip()


def test_each_capability_enables_an_additional_way_to_open_files(public_python):
    with TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        program = compile_c(Path(folder, "waits"), WAITS)
        with running(program) as pid:
            request = wanted(pid, program)
            assert opened_as_nobody(public_python, request) == "FORBIDDEN"
            assert opened_as_nobody(public_python, request, "sys_ptrace") == "exe"
            program.chmod(0o700)
            assert opened_as_nobody(public_python, request, "sys_ptrace") == "FORBIDDEN"
            reads = ("sys_ptrace", "dac_read_search")
            assert opened_as_nobody(public_python, request, *reads) == "exe"
            assert (
                opened_as_nobody(public_python, request, *reads, "checkpoint_restore")
                == "map_files"
            )
