"""Files are written completely or not at all, and never through another user's links."""

import contextlib
import errno
import os
import stat

import pytest

from otel_kprofiler.host import AppendedFile, NewFile, PrivateDirectory
from tests.raising import raising

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture(params=["nameless", "named", "without hard links"])
def file_system(request, monkeypatch):
    """Simulates file systems with and without ``O_TMPFILE`` and hard links."""
    if request.param != "nameless":
        real = os.open

        def without_tmpfile(path, flags, *arguments, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return real(path, flags, *arguments, **more)

        monkeypatch.setattr(os, "open", without_tmpfile)
    if request.param == "without hard links":
        monkeypatch.setattr(os, "link", raising(OSError(errno.EPERM, "not permitted")))


@pytest.fixture
def theirs(tmp_path):
    directory = tmp_path / "theirs"
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)
    (tmp_path / "ours").write_bytes(b"precious")
    yield directory
    assert (tmp_path / "ours").read_bytes() == b"precious"


def put(path, content=b"new", **options):
    file = NewFile(str(path), **options)
    os.write(file.fd, content)
    file.finish()


@pytest.mark.usefixtures("file_system")
def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    file = NewFile(str(path), mode=0o640)
    os.write(file.fd, b"half")
    assert not path.exists()
    os.write(file.fd, b" and half")
    file.finish()
    assert path.read_bytes() == b"half and half"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    unfinished = NewFile(str(tmp_path / "other"))
    os.write(unfinished.fd, b"half")
    unfinished.abandon()
    unfinished.abandon()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("file_system")
def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        NewFile(str(path))
    NewFile(str(path), replace=True).abandon()
    assert path.read_bytes() == b"old"
    put(path, replace=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("file_system")
def test_a_file_created_during_the_write_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    file = NewFile(str(path))
    path.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        file.finish()
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@as_root
@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("replace", [False, True])
def test_another_users_symlink_is_neither_followed_nor_replaced(theirs, tmp_path, replace):
    (theirs / "out").symlink_to(tmp_path / "ours")
    (theirs / "below").symlink_to(tmp_path)
    for path in (theirs / "out", theirs / "below" / "new"):
        with pytest.raises(OSError, match="symbolic link that other users can change"):
            NewFile(str(path), replace=replace)
    assert (theirs / "out").is_symlink()
    assert not (tmp_path / "new").exists()


@as_root
@pytest.mark.usefixtures("file_system")
def test_a_link_created_during_the_write_is_not_followed(theirs, tmp_path):
    path = theirs / "out"
    file = NewFile(str(path), replace=True)
    os.write(file.fd, b"new")
    path.symlink_to(tmp_path / "ours")
    for entry in theirs.iterdir():  # as a directory's owner can do at any time
        if entry != path:
            entry.unlink()
            entry.symlink_to(tmp_path / "ours")
    file.finish()
    assert (tmp_path / "ours").read_bytes() == b"precious"


@as_root
def test_an_unprivileged_user_follows_links_permitted_by_the_kernel(tmp_path):
    shared = tmp_path / "group writable"
    shared.mkdir()
    shared.chmod(0o775)
    (tmp_path / "real").mkdir()
    (shared / "below").symlink_to(tmp_path / "real")
    (shared / "out").symlink_to(tmp_path / "real" / "other")
    for path in (tmp_path, tmp_path / "real", shared):
        os.chown(path, NOBODY, NOBODY)
    with as_nobody(tmp_path):
        put(shared / "below" / "there")
        put(shared / "out")
    assert sorted(entry.name for entry in (tmp_path / "real").iterdir()) == ["other", "there"]
    # fs.protected_symlinks forbids following this link.
    shared.chmod(0o1777)
    os.chown(shared, 0, 0)
    os.lchown(shared / "out", 1, 1)
    with as_nobody(tmp_path), pytest.raises(OSError, match="symbolic link"):
        NewFile(str(shared / "out"), replace=True)


@contextlib.contextmanager
def as_nobody(directory):
    """Drops this process's root privileges during the block, except for access to a directory."""
    for parent in directory.parents:
        if parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.usefixtures("file_system")
def test_the_next_free_file_name_is_used_if_the_requested_name_is_taken(tmp_path):
    file = NewFile(str(tmp_path / "out"))
    os.write(file.fd, b"new")
    for name in ("out", "out-2"):
        (tmp_path / name).write_bytes(b"theirs")
    file.finish([f"out-{number}" for number in range(2, 9)])
    assert file.path == str(tmp_path / "out-3")
    assert [(tmp_path / name).read_bytes() for name in ("out", "out-2", "out-3")] == [
        b"theirs", b"theirs", b"new",
    ]  # fmt: skip


@as_root
@pytest.mark.parametrize("file_system", ["named"], indirect=True)
@pytest.mark.usefixtures("file_system")
def test_the_temporary_name_of_an_unfinished_file_is_unpredictable(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (theirs / ".out.guessed").symlink_to(tmp_path / "ours")
    with pytest.raises(FileExistsError):
        NewFile(str(theirs / "out"))


@as_root
@pytest.mark.usefixtures("file_system")
def test_swapping_a_directory_for_a_link_does_not_redirect_a_write(theirs, tmp_path):
    ours = tmp_path / "directory of ours"
    ours.mkdir()
    (theirs / "below").mkdir()
    file = NewFile(str(theirs / "below" / "out"))
    (theirs / "below").rename(theirs / "away")
    (theirs / "below").symlink_to(ours)
    os.write(file.fd, b"new")
    file.finish()
    assert not list(ours.iterdir())
    assert (theirs / "away" / "out").read_bytes() == b"new"


def test_a_symlink_owned_by_the_same_user_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("there")
    put(tmp_path / "link")
    put(tmp_path / "link", b"newer", replace=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"newer"
    file = AppendedFile(str(tmp_path / "link"))
    os.write(file.fd, b" and more")
    file.close()
    assert (tmp_path / "there").read_bytes() == b"newer and more"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        NewFile(str(tmp_path / "round"))


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", ""])
def test_only_regular_files_are_replaced(tmp_path, path):
    with pytest.raises(OSError):
        NewFile(path or str(tmp_path), replace=True)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@as_root
def test_other_users_links_are_not_followed_when_appending(theirs, tmp_path):
    (theirs / "symbolic").symlink_to(tmp_path / "ours")
    with pytest.raises(OSError, match="symbolic link that other users can change"):
        AppendedFile(str(theirs / "symbolic"))
    os.link(tmp_path / "ours", theirs / "hard")
    with pytest.raises(OSError, match="more than one hard link"):
        AppendedFile(str(theirs / "hard"))
    os.unlink(theirs / "hard")
    (theirs / "prepared").write_bytes(b"")
    os.chown(theirs / "prepared", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        AppendedFile(str(theirs / "prepared"))
    file = AppendedFile(str(theirs / "plain"))
    (theirs / "plain").unlink()
    (theirs / "plain").symlink_to(tmp_path / "ours")
    assert not file.is_in_place()
    file.move_to("backup")
    os.write(file.fd, b"new")
    assert (theirs / "plain").read_bytes() == b"new"
    file.close()


def test_pipes_devices_and_standard_output_can_be_appended_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", "/dev/stdout", str(tmp_path / "pipe")):
        file = AppendedFile(path)
        assert file.is_in_place()
        file.close()
        file.close()


@as_root
@pytest.mark.parametrize(
    ("owner", "mode", "reason"),
    [(NOBODY, 0o700, "belongs to user 65534"), (0, 0o770, "mode 0770"), (0, 0o1707, "mode 1707")],
)
def test_a_directory_writable_by_others_is_not_accepted_as_private(tmp_path, owner, mode, reason):
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner, owner)
    with pytest.raises(PermissionError, match=reason):
        PrivateDirectory(str(tmp_path))


def test_a_private_directory_is_accessible_only_to_its_owner(tmp_path):
    before = os.umask(0)
    try:
        directory = PrivateDirectory(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    os.close(directory.open("file", os.O_CREAT | os.O_RDWR))
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == 0o600
    assert directory.is_in_place()
    (tmp_path / "a" / "b").rename(tmp_path / "a" / "c")
    assert not directory.is_in_place()
    directory.close()


def test_only_regular_files_owned_by_the_user_are_opened_in_a_private_directory(tmp_path):
    directory = PrivateDirectory(str(tmp_path))
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    kinds = ["link", "pipe"]
    if os.geteuid() == 0:
        (tmp_path / "foreign").write_bytes(b"")
        os.chown(tmp_path / "foreign", NOBODY, NOBODY)
        kinds.append("foreign")
    for name in kinds:
        with pytest.raises(OSError):
            directory.open(name, os.O_RDONLY)
    directory.close()
