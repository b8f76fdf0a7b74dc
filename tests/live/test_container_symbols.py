"""Debug files for containerized programs are found in the container and match the programs."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from unwind_maps import compile_c, device_number, running

from otel_kprofiler.elf import FileSource, hash_file, read_elf
from otel_kprofiler.host import Access, open_regular
from otel_kprofiler.model import FileDetails, FileKey, Unresolved
from otel_kprofiler.symbols.user.names import UserSymbolSettings, open_user_names
from tests.further import further_of
from tests.fuse import mounted, require_fuse
from tests.needs import LIBBPF
from tests.truth.naming import sample_host
from tests.waiting import wait_until

pytestmark = pytest.mark.live

WORKS = """
    #include <unistd.h>
    volatile long count;
    __attribute__((noinline)) static void %s(void) { for (int i = 0; i < 1000; i++) count++; }
    __attribute__((noinline)) void outer(void) { %s(); count++; }
    int main(void) { write(1, "\\n", 1); for (;;) outer(); }
"""
NO_BUILD_ID, BUILD_ID = "-Wl,--build-id=none", "-Wl,--build-id=0x" + "ab" * 20
OTHER_ID = "-Wl,--build-id=0x" + "cd" * 20
BY_ID = ".build-id/ab/" + "ab" * 19 + ".debug"


class Container:
    """A root directory on a file system that is mounted only in the program's mount namespace."""

    def __init__(self, directory, build_id, function="hot"):
        self.root = directory / "root"
        self.root.mkdir(parents=True)
        self.program, self.debug = directory / "works", directory / "works.debug"
        source = WORKS % (function, function)
        compile_c(self.program, source, "-O1", "-g", "-static", build_id)
        run("objcopy", "--only-keep-debug", self.program, self.debug)
        run("strip", self.program)
        run("objcopy", f"--add-gnu-debuglink={self.debug}", self.program)

    def running(self, prepare, enter=None):
        """Runs the program during the block, in a root directory prepared by shell commands."""
        script = (
            'mount -t tmpfs none "$1" && cp -p "$2" "$1/works" && debug=$3 && cd "$1" && '
            f"{{ {prepare} ; }} && {enter or ENTERED['pivot_root']}"
        )
        words = ["unshare", "-m", "sh", "-c", script, "sh", self.root, self.program, self.debug]
        return running(*words)


def run(*command):
    subprocess.run(command, check=True)


@contextmanager
def loading(detail="names"):
    names = open_user_names(UserSymbolSettings(detail=detail, cpu_share=1.0))
    try:
        yield names
    finally:
        names.close()


def add(names, process, path="/works"):
    """Requests symbols for a process's program as the agent does, and returns the file's key."""
    opened = open_regular(Access(), f"/proc/{process.pid}/exe")
    try:
        status = os.fstat(opened.fd)
        source = FileSource(opened.fd, opened.size)
        elf = read_elf(source)
        details = FileDetails(path, elf.build_id, hash_file(source), elf.texts)
        key = FileKey(status.st_ino, device_number(status.st_dev), 0)
        names.add(key, details, opened, process.pid)
    finally:
        os.close(opened.fd)
    return key


def address_of(path, function):
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    return next(int(line.split()[0], 16) for line in listed.splitlines() if line.endswith(function))


def name_in(container, process, path="/works"):
    """Returns the name for the address of ``hot``, or the reason why there is no name."""
    with loading() as names:
        key = add(names, process, path)
        names.finish(60)
        named = names.name(key, address_of(container.debug, " hot"))
    return named.lines[0].function if named.lines else named.unresolved


BESIDE = 'cp "$debug" works.debug'
LINKED = f'mkdir -p usr/lib/debug/{BY_ID[:12]} store && cp "$debug" store/file && '
PLACES = {
    "beside the program": BESIDE,
    "below .debug": 'mkdir .debug && cp "$debug" .debug/works.debug',
    "by its path": 'mkdir -p usr/lib/debug && cp "$debug" usr/lib/debug/works.debug',
    "by build id": f'mkdir -p usr/lib/debug/{BY_ID[:12]} && cp "$debug" usr/lib/debug/{BY_ID}',
    "by an absolute link": LINKED + f"ln -s /store/file usr/lib/debug/{BY_ID}",
}


@pytest.mark.parametrize("place", PLACES)
def test_programs_are_symbolized_from_debug_files_in_their_container(place, tmp_path):
    container = Container(tmp_path, BUILD_ID)
    with container.running(PLACES[place]) as process:
        assert name_in(container, process) == "hot"


def test_a_debug_file_without_a_build_id_is_matched_by_checksum(tmp_path):
    container = Container(tmp_path / "one", NO_BUILD_ID)
    with container.running(BESIDE) as process:
        assert name_in(container, process) == "hot"
    other = Container(tmp_path / "two", NO_BUILD_ID, "cold")
    container.debug, other.debug = other.debug, container.debug
    with container.running(BESIDE) as process:
        assert name_in(other, process) is Unresolved.NO_SYMBOL_TABLE


@pytest.mark.parametrize("build_id", [BUILD_ID, NO_BUILD_ID])
def test_a_different_debug_file_on_the_host_is_not_used(build_id, tmp_path):
    """The host has a file at the path where the container's debug file would be."""
    container = Container(tmp_path / "one", build_id)
    other = Container(tmp_path / "two", OTHER_ID, "cold")
    (tmp_path / "host").mkdir()
    path = tmp_path / "host" / "works"
    (tmp_path / "host" / "works.debug").write_bytes(other.debug.read_bytes())
    with container.running("true") as process:
        assert name_in(container, process, str(path)) is Unresolved.NO_SYMBOL_TABLE
    (tmp_path / "host" / "works.debug").write_bytes(container.debug.read_bytes())
    with container.running("true") as process:
        assert name_in(container, process, str(path)) == "hot"


HOSTILE = {
    "a pipe": "mkfifo works.debug",
    "a device": "mknod works.debug c 1 5",
    "a directory": "mkdir works.debug",
    "a loop": "ln -s works.debug works.debug",
    "a link of /proc": "mkdir proc && mount -t proc none proc && ln -s /proc/self/exe works.debug",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_special_files_are_not_opened(kind, tmp_path):
    container = Container(tmp_path, BUILD_ID)
    with container.running(HOSTILE[kind]) as process:
        assert name_in(container, process) is Unresolved.NO_SYMBOL_TABLE


@pytest.mark.parametrize("climb", ["", "/../../../../../../../../../.."])
def test_symlinks_cannot_escape_the_container(climb, tmp_path):
    container = Container(tmp_path, BUILD_ID)
    outside = f"{climb}{container.debug}"  # path of the debug file outside the container
    with container.running(f"ln -s {outside} works.debug") as process:
        assert name_in(container, process) is Unresolved.NO_SYMBOL_TABLE


def test_exported_names_are_used_while_the_search_for_a_debug_file_hangs(tmp_path):
    require_fuse()
    container = Container(tmp_path, BUILD_ID)
    with mounted(tmp_path / "fuse", {"works.debug": b""}) as fuse:
        prepare = f"mkdir .debug && mount --bind {fuse.point} .debug"
        with container.running(prepare) as process, loading() as names:
            fuse.freeze()
            key = add(names, process)
            address = address_of(container.debug, " hot")
            wait_until(lambda: names.name(key, address).unresolved is Unresolved.NO_SYMBOL_TABLE)
            assert names.counts().pending == 0
            fuse.thaw()


def test_names_from_other_files_are_found_while_a_shared_dwarf_file_hangs(tmp_path):
    require_fuse()
    programs = [tmp_path / name for name in ("hostile", "other")]
    for program in programs:
        compile_c(program, WORKS % ("hot", "hot"), "-O1", "-g", BUILD_ID)  # not stripped
    with mounted(tmp_path / "fuse", {"common": b""}) as fuse:
        link = tmp_path / "link"
        link.write_bytes(os.fsencode(fuse.point / "common") + b"\0" + bytes(20))
        run("objcopy", f"--add-section=.gnu_debugaltlink={link}", programs[0])
        address = address_of(programs[1], " hot")
        with (
            running(programs[0]) as hostile,
            running(programs[1]) as other,
            loading("lines") as names,
        ):
            fuse.freeze()
            add(names, hostile)
            wait_until(lambda: not names.counts().pending)
            key = add(names, other, "/other")
            wait_until(lambda: names.name(key, address).lines)
            fuse.thaw()


ENTERED = {
    "pivot_root": "mkdir old && pivot_root . old && exec /works",
    "chroot": 'exec chroot "$1" /works',
}


@LIBBPF
@pytest.mark.parametrize("how", further_of(ENTERED, ("chroot",)))
def test_functions_in_a_container_are_named_from_a_debug_file_in_the_container(how, tmp_path):
    with Container(tmp_path, BUILD_ID).running(BESIDE, ENTERED[how]):
        wait_until(lambda: any(leaf.function == "hot" for leaf in leaves(sample_host(1.0))))


def leaves(windows):
    """Yields the leaf frames that are in the container's program."""
    for window in windows:
        for _, sample in window.samples:
            module = sample.stack.frames[0].module
            if module and module.name.endswith("works"):
                yield sample.stack.frames[0]
