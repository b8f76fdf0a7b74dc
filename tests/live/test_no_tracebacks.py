"""Commands report unusable input and output files in two lines, without a traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from otel_kprofiler.model import Stack, WindowSample
from otel_kprofiler.otlp import encode_window
from tests.further import further
from tests.windows import make_window

pytestmark = pytest.mark.live

AGENT = """
receivers: {kprofiler: {}}
exporters: {debug: {}}
service: {pipelines: {profiles: {receivers: [kprofiler], exporters: [debug]}}}
"""


def run(shell, directory="/"):
    return subprocess.run(
        ["sh", "-c", f'"$0" -m otel_kprofiler {shell}', sys.executable],
        capture_output=True, text=True, cwd=directory, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("words", ["--help", "symbolize vfs_read", *further("record --help")])
def test_writing_to_a_full_or_closed_output_is_an_error(words):
    for output, reason in ((">/dev/full", "No space left"), (">&-", "Bad file descriptor")):
        done = run(f"{words} {output}")
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot write to standard output: {reason}")
        assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("words", ["--help | true", "symbolize vfs_read | true", "check many | :"])
def test_a_reader_that_closes_the_pipe_is_not_an_error(words, tmp_path):
    (tmp_path / "many").write_text('{"unknown": 1}\n' * 5000)  # each line is reported
    assert run(words, tmp_path).stderr == ""


# Imports the commands once and runs each in a forked child, which is faster than exec.
RUN_ALL = """
import importlib, json, os, sys
from otel_kprofiler.cli.main import COMMANDS, main
for name in COMMANDS:
    importlib.import_module("otel_kprofiler.cli." + name.replace("-", "_"))
cases, results = json.load(sys.stdin), []
for words, output, as_nobody in cases:
    messages = os.memfd_create("stderr")
    child = os.fork()
    if not child:
        os.dup2(os.open(output, os.O_WRONLY), 1)
        os.dup2(messages, 2)
        if as_nobody:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        try:
            main(words)
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 99
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results.append([status, os.pread(messages, 1 << 20, 0).decode()])
print(json.dumps(results))
"""
READERS = [
    ["check"], ["report"], ["diff", "good.otlp"], ["send", "good.otlp"], ["record", "--replay"],
    ["symbolize", "--rva", "1", "--elf"], ["symbolize", "-o", "-", "--payload"],
    ["symbolize", "vfs_read", "--kallsyms"], ["validate", "-c"], ["print-config", "-c"],
    ["run", "-c"],
]  # fmt: skip
WRITERS = [
    ["record", "-d", "1s", "-o"], ["record", "-d", "1s", "-o", "fine.html", "--raw"],
    ["report", "good.otlp", "-f", "folded", "-o"],
    ["symbolize", "--payload", "good.otlp", "-o"],
]  # fmt: skip
PRINTERS = [
    ["report", "good.otlp"], ["report", "good.otlp", "--json"], ["check", "good.otlp"],
    ["check", "good.otlp", "--json"], ["diff", "good.otlp", "good.otlp"],
    ["report", "good.otlp", "-f", "folded"], ["report", "good.otlp", "-f", "pprof"],
    ["symbolize", "-o", "-", "--payload", "good.otlp"], ["doctor"], ["doctor", "--json"],
    ["print-config", "-c", "good.yaml"], ["symbolize", "vfs_read", "--json"],
]  # fmt: skip


@pytest.fixture
def directory():
    """Creates a directory with a profile, a configuration, and files other users cannot read."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # other users cannot access pytest's directory
    directory.chmod(0o755)
    start = 1_700_000_000_000_000_000
    sample = WindowSample(Stack(()), 7, "main", 0, None, [start])
    window = make_window(start, start + 10**9, ({"process.pid": 1}, [sample]))
    (directory / "good.otlp").write_bytes(encode_window(window).batches[0].payload)
    (directory / "good.yaml").write_text(AGENT)
    (directory / "secret").write_bytes(b"secret")
    (directory / "secret").chmod(0o600)
    (directory / "closed").mkdir(mode=0o700)
    yield directory
    shutil.rmtree(directory)


def run_all(cases, directory, python=sys.executable):
    """Runs cases (arguments, stdout, whether to run as nobody). Returns statuses and errors."""
    done = subprocess.run(
        [python, "-c", RUN_ALL],
        input=json.dumps(cases), capture_output=True, text=True, cwd=directory, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_errors(cases, directory, *python, names=frozenset()):
    """Checks the statuses and errors. An error about a file in ``names`` must name the file."""
    wrong = [
        (words, status, messages)
        for (words, *_), (status, messages) in zip(
            cases, run_all(cases, directory, *python), strict=True
        )
        if status not in (1, 2, 3)
        or "Traceback" in messages
        or "[Errno" in messages
        or "rror: " not in messages
        or ("fix: " not in messages and status != 2)
        or not ("cannot be read" in messages or all(name in messages for name in names & {*words}))
    ]
    assert not wrong


def test_every_command_reports_an_unusable_file(directory):
    ends = {"send": ["grpc://127.0.0.1:1"]}
    paths = ["none", ".", "itself", "good.otlp/none", "\udcff", "x" * 300]
    (directory / "itself").symlink_to("itself")
    cases = [
        [[*words, path, *ends.get(words[0], [])], os.devnull, False]
        for words in READERS
        for path in paths
    ]
    check_errors(cases, directory, names={"none", "itself", "good.otlp/none"})


def test_every_command_run_by_another_user_reports_missing_permissions(directory, public_python):
    ends = {"send": ["grpc://127.0.0.1:1"]}
    reading = [[*words, "secret", *ends.get(words[0], [])] for words in READERS]
    writing = [[*words, path] for words in WRITERS for path in ("closed/x.html", "x.html")]
    cases = [[words, os.devnull, True] for words in (*reading, *writing)]
    check_errors(cases, directory, public_python.command)
    assert sorted(os.listdir(directory)) == ["closed", "good.otlp", "good.yaml", "secret"]


def test_every_command_reports_a_full_disk(directory):
    cases = [[words, "/dev/full", False] for words in PRINTERS]
    cases.append([["report", "good.otlp", "-f", "html", "-o", "/dev/full"], os.devnull, False])
    check_errors(cases, directory)


# Ctrl-C arrives during the import of one of the slow libraries.
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
def test_ctrl_c_during_startup_prints_no_traceback(name):
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(name=name)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in done.stderr
