"""Files are found by inode number in directories in which other files were found earlier."""

import os
import threading

from otel_kprofiler.host.file_places import MAX_DIRECTORIES, FilePlaces
from tests.waiting import call_in_thread


def inode(path):
    return os.stat(path).st_ino


def test_a_file_is_searched_for_in_directories_where_files_were_found_earlier(tmp_path):
    other, file = tmp_path / "other", tmp_path / "file"
    file.touch()
    places = FilePlaces()
    assert [*places.find(inode(file))] == []
    places.add(str(other))
    assert [*places.find(inode(file))] == [str(file)]
    assert [*FilePlaces([str(tmp_path)]).find(inode(file))] == [str(file)]


def test_a_changed_directory_is_read_again(tmp_path):
    (tmp_path / "first").touch()
    places = FilePlaces([str(tmp_path)])
    assert [*places.find(inode(tmp_path / "first"))] == [str(tmp_path / "first")]
    os.rename(tmp_path / "first", tmp_path / "second")
    os.utime(tmp_path, ns=(0, 1))  # changes even a coarse timestamp
    assert [*places.find(inode(tmp_path / "second"))] == [str(tmp_path / "second")]


def test_missing_directories_contain_no_files(tmp_path):
    assert [*FilePlaces([str(tmp_path / "missing"), ""]).find(1)] == []


def test_the_most_recently_matched_directories_are_kept(tmp_path):
    files = []
    places = FilePlaces()
    for number in range(MAX_DIRECTORIES + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        files.append(folder / "file")
        files[-1].touch()
        places.add(str(files[-1]))
        places.add(str(files[1] if number else files[0]))
    assert [*places.find(inode(files[0]))] == []
    for file in files[1:]:
        assert [*places.find(inode(file))] == [str(file)]


def test_an_unresponsive_directory_blocks_only_one_thread(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    places, answer = FilePlaces([str(tmp_path)]), threading.Event()
    asked, scan = threading.Event(), os.scandir

    def wait(path):
        asked.set()
        assert answer.wait(60)
        return scan(path)

    monkeypatch.setattr(os, "scandir", wait)
    result = call_in_thread(lambda: [*places.find(inode(file))])
    try:
        assert asked.wait(60)
        assert [*places.find(inode(file))] == []
    finally:
        answer.set()
    assert result.result() == [*places.find(inode(file))] == [str(file)]
