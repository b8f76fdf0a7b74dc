"""Files whose symbols were evicted are reopened through processes that map them."""

import os
import shutil

import pytest
from unwind_maps import WAITS, compile_c, device_number, running

from otel_kprofiler.elf import FileSource, hash_file, read_elf
from otel_kprofiler.host import Access, open_regular
from otel_kprofiler.model import FileDetails, FileKey, Unresolved
from otel_kprofiler.symbols.user.names import UserSymbolSettings, open_user_names
from otel_kprofiler.symbols.user.reopening import WantedFile, reopen

pytestmark = pytest.mark.live

MEMORY_BYTES, PROGRAMS = 800_000, 10
NO_BUILD_ID, BUILD_ID = "-Wl,--build-id=none", "-Wl,--build-id=sha1"


def in_container(program, mounts):
    """Runs a program at a path that exists only in its mount namespace."""
    copy = mounts / program.name
    script = 'mount -t tmpfs none "$1" && cp -p "$2" "$3" && exec "$3"'
    return running("unshare", "-m", "sh", "-c", script, "sh", mounts, program, copy)


def on_overlay(program, mounts):
    script = (
        'cd "$1" && mount -t tmpfs none . && cd . && cd "$1" && mkdir lower upper work root &&'
        ' cp -p "$2" lower && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work'
        ' none root && exec "$1/root/$3"'
    )
    return running("unshare", "-m", "sh", "-c", script, "sh", mounts, program, program.name)


def wanted(process, path=None, *, owner=0, device=None):
    """Returns the ``WantedFile`` that the agent records on first opening a process's executable."""
    exe = f"/proc/{process.pid}/exe"
    with open(exe, "rb") as file:
        status = os.fstat(file.fileno())
        source = FileSource(file.fileno(), status.st_size)
        elf = read_elf(source)
        shown = str(path or os.readlink(exe))
        details = FileDetails(shown, elf.build_id, hash_file(source), elf.texts)
    number = device_number(status.st_dev) if device is None else device
    key = FileKey(status.st_ino, number, 0)
    return WantedFile(key, details, owner, status.st_size, status.st_mtime_ns)


def content(file):
    with open(file.fd, "rb") as opened:
        return opened.read()


@pytest.fixture
def mounts(tmp_path):
    directory = tmp_path / "mounts"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("build_id", [NO_BUILD_ID, BUILD_ID])
@pytest.mark.parametrize("is_owner", [True, False])
def test_container_files_are_opened_via_any_process_using_them(
    build_id, is_owner, tmp_path, mounts
):
    program = compile_c(tmp_path / "waits", WAITS, build_id)
    with in_container(program, mounts) as process:
        file = reopen(wanted(process, owner=process.pid if is_owner else 0), Access())
        assert not (mounts / "waits").exists()
        assert content(file) == program.read_bytes()


def test_a_file_on_an_overlay_is_opened_if_the_kernel_reports_another_device(tmp_path, mounts):
    program = compile_c(tmp_path / "waits", WAITS, NO_BUILD_ID)
    with on_overlay(program, mounts) as process:
        elsewhere = device_number(os.stat("/").st_dev)  # differs from the inode's device
        assert content(reopen(wanted(process, device=elsewhere), Access())) == program.read_bytes()


def test_a_deleted_file_is_reopened(tmp_path):
    program = compile_c(tmp_path / "waits", WAITS, NO_BUILD_ID)
    whole = program.read_bytes()
    with running(program) as process:
        asked = wanted(process)
        program.unlink()
        assert content(reopen(asked, Access())) == whole


def test_a_host_file_at_the_same_path_is_not_opened_if_no_process_maps_it(tmp_path, mounts):
    program = compile_c(tmp_path / "waits", WAITS, NO_BUILD_ID)
    with in_container(program, mounts) as process:
        asked = wanted(process)
    shutil.copy2(program, mounts)  # the copy has the same path, content and hash
    assert asked.details.path == str(mounts / "waits")
    assert reopen(asked, Access()) is None


def test_a_changed_file_is_not_reopened(tmp_path):
    program = compile_c(tmp_path / "waits", WAITS, NO_BUILD_ID)
    with running(program) as process:
        asked = wanted(process)
        changed = asked._replace(modified_ns=asked.modified_ns - 1_000_000_000)
        assert reopen(changed, Access()) is None
        assert reopen(asked._replace(size=asked.size + 1), Access()) is None
        other = asked.details._replace(file_id=type(asked.details.file_id)("0" * 32))
        assert reopen(asked._replace(details=other), Access()) is None
        assert content(reopen(asked, Access())) == program.read_bytes()


def test_an_identical_file_that_replaced_the_original_is_accepted_by_build_id(tmp_path):
    program = compile_c(tmp_path / "waits", WAITS, BUILD_ID)
    with running(program) as process:
        asked = wanted(process)
    whole = program.read_bytes()
    program.unlink()
    program.write_bytes(whole)
    assert content(reopen(asked, Access())) == whole


def test_the_vdso_is_read_again_after_eviction():
    details = FileDetails("[vdso]", None, None)
    assert reopen(WantedFile(FileKey(0, 0xFFFFFFFF, 0), details), Access()).startswith(b"\x7fELF")


def test_container_files_without_build_ids_are_resolved_again_after_eviction(tmp_path, mounts):
    """Only one of two tables fits in memory at a time, so the evicted table is read again."""
    functions = "\n".join(f"void function_{number}(void) {{}}" for number in range(2000))
    program = compile_c(tmp_path / "waits", WAITS + functions, NO_BUILD_ID)
    names = open_user_names(
        UserSymbolSettings(detail="names", max_bytes=MEMORY_BYTES, cpu_share=1.0)
    )
    files, contexts = [], []
    try:
        for number in range(PROGRAMS):
            directory = mounts / str(number)
            directory.mkdir()
            context = in_container(program, directory)
            process = context.__enter__()
            contexts.append(context)
            file = wanted(process, owner=process.pid)
            opened = open_regular(Access(), f"/proc/{process.pid}/root{file.details.path}")
            names.add(file.key, file.details, opened, process.pid)
            os.close(opened.fd)
            names.finish(60)
            files.append(file)
        text = files[0].details.texts[0].address + files[0].details.texts[0].size // 2
        assert names.counts().loaded == PROGRAMS, names.counts()
        assert names.counts().evicted >= 1, names.counts()
        for file in files * 3:
            if names.name(file.key, text).unresolved is Unresolved.SYMBOLS_PENDING:
                names.finish(60)
            found = names.name(file.key, text)
            # the symbols were not evicted in the meantime
            if found.unresolved is not Unresolved.SYMBOLS_DROPPED:
                assert found.lines[0].function.startswith("function_"), found
        assert names.counts().loaded > PROGRAMS
        assert (names.counts().gone, names.counts().refused) == (0, 0)
        for context in contexts:
            context.__exit__(None, None, None)
        contexts.clear()
    finally:
        for context in contexts:
            context.__exit__(None, None, None)
        names.close()
