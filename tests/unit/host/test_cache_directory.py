"""The cache directory has a limited size, and is protected from other users."""

import os

import pytest

from otel_kprofiler.host import CacheDirectory, find_cache_path


def put(cache, name, size):
    file = cache.create(name)
    os.write(file.fd, bytes(size))
    file.finish()


@pytest.fixture
def cache(tmp_path):
    directory = CacheDirectory(str(tmp_path / "made" / "cache"), 100_000)
    yield directory
    directory.close()


def test_least_recently_used_files_are_removed(cache):
    for index in range(8):
        put(cache, f"file{index}", 20_480)
        os.utime(f"{cache.path}/file{index}", (0, index))
    os.close(cache.open("file0"))  # makes file0 the most recently used
    assert cache.trim() <= 100_000
    assert sorted(os.listdir(cache.path)) == ["file0", "file5", "file6", "file7"]


def test_the_new_content_of_a_replaced_cache_file_is_read(cache):
    put(cache, "a", 10)
    kept = cache.open("a")
    put(cache, "a", 20)
    fd = cache.open("a")
    assert (os.fstat(kept).st_size, os.fstat(fd).st_size) == (10, 20)
    cache.remove("a")
    cache.remove("a")
    assert len(os.read(fd, 100)) == 20
    assert cache.open("a") is None
    assert cache.age_s("a", 0) is None
    os.close(kept)
    os.close(fd)


def test_releasing_the_last_reference_closes_the_directory(tmp_path):
    cache = CacheDirectory(str(tmp_path), 1)
    assert str(tmp_path) in open_paths()
    del cache
    assert str(tmp_path) not in open_paths()


def open_paths():
    with os.scandir("/proc/self/fd") as entries:
        return {os.readlink(entry.path) for entry in entries}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_other_users_files_and_directories_are_not_trusted(cache, tmp_path):
    put(cache, "a", 10)
    os.chown(f"{cache.path}/a", 1, 1)
    assert cache.open("a") is None
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    os.chown(other, 1, 1)
    with pytest.raises(PermissionError):
        CacheDirectory(str(other), 1)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\n", "x" * 300])
def test_file_names_that_would_escape_the_directory_are_rejected(name, cache):
    with pytest.raises(ValueError, match="not the name of a cached file"):
        cache.open(name)


@pytest.mark.parametrize(
    ("environ", "user", "path"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/a:/b", "HOME": "/h"}, 0, "/var/cache/a"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, 0, "/x/otel-kprofiler"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, 7, "/h/.cache/otel-kprofiler"),
        ({"HOME": "/root"}, 0, "/var/cache/otel-kprofiler"),
        ({}, 7, None),
    ],
)
def test_the_cache_directory_depends_on_the_environment(environ, user, path):
    assert find_cache_path(environ, user) == path
