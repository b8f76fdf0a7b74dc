"""What is wrong with an output or a file is told in two lines, by every command."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

READING = [
    "check", "report", "record --replay", "symbolize --rva 1 --elf", "symbolize --payload",
    "validate -c", "print-config -c", "run -c",
]  # fmt: skip


def run(shell, directory="/"):
    return subprocess.run(
        ["sh", "-c", f'"$0" -m otel_kprofiler {shell}', sys.executable],
        capture_output=True, text=True, cwd=directory, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("words", ["--help", "record --help", "symbolize vfs_read"])
def test_an_output_that_is_full_or_closed_is_an_error(words):
    for output, reason in ((">/dev/full", "No space left"), (">&-", "Bad file descriptor")):
        done = run(f"{words} {output}")
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot write to standard output: {reason}")
        assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("words", ["--help", "symbolize vfs_read"])
def test_a_reader_that_goes_away_is_none(words):
    assert run(f"{words} | true").stderr == ""


@pytest.mark.parametrize("words", READING)
def test_files_that_cannot_be_read_are_errors(words, tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        done = run(f"{words} {path}", tmp_path)
        assert done.returncode in (1, 2, 3), done.stderr
        assert "Traceback" not in done.stderr
        assert "Errno" not in done.stderr
        assert "rror: " in done.stderr


# Ctrl-C arrives where a library is imported, of those that take long.
EARLY = """
import builtins, os, runpy, signal, sys
load = builtins.__import__
def hook(name, *more, **named):
    if name == {name!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *more, **named)
builtins.__import__ = hook
sys.argv = ["otel-kprofiler", "doctor"]
runpy.run_module("otel_kprofiler", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["click", "importlib", "otel_kprofiler.host"])
def test_an_early_ctrl_c_is_silent(name):
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(name=name)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in done.stderr
