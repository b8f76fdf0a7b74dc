"""Files written by ``record``: no recording is lost, and no other file is overwritten."""

import contextlib
import gzip
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import threading

import pytest
from programs import recording
from samplers import IN_KERNEL, load

from otel_kprofiler.otlp import read_profiles
from tests.commands import run_checked, run_command
from tests.further import further
from tests.waiting import wait_until

pytestmark = pytest.mark.live

SHORT = ["-d", "0.5s", "-F", "499", "--stacks", "kernel", "--idle"]


@pytest.fixture(autouse=True, scope="module")
def _kernel_load():
    """Keeps the kernel busy, because the sampling timers on idle CPUs may stop.

    The load runs at normal priority, so that the user code in other processes, which is not
    sampled, cannot starve it.
    """
    with load(IN_KERNEL):
        yield


@pytest.fixture
def record(tmp_path):
    return lambda *words: run_checked("record", *SHORT, *words, cwd=tmp_path)


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a recording and, once it is sampling, returns its process."""
    with contextlib.ExitStack() as running:
        yield lambda *words: running.enter_context(
            recording(*SHORT, "-d", "1h", *words, cwd=tmp_path)
        )


def end(running):
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    return errors


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def wait_for_samples(part, windows):
    def read():
        result = read_profiles(str(part)) if part.exists() else []
        return result if len(result) >= windows else None

    return wait_until(read)


def test_samples_from_a_killed_recording_are_kept_and_reported_by_the_next(start, record, tmp_path):
    part = tmp_path / "x.html.part"
    running = start("-o", "x.html")
    seen = wait_for_samples(part, 3)
    running.kill()
    running.communicate()
    assert names(tmp_path) == [part.name]
    assert stat.S_IMODE(part.stat().st_mode) == 0o600
    left = read_profiles(str(part))
    assert len(left) >= len(seen)
    for one, following in itertools.pairwise(left):
        assert one.start_unix_ns < one.end_unix_ns
        assert one.end_unix_ns == following.start_unix_ns
    # Check only the shortest window: on a busy machine, some windows are closed late.
    assert min(window.end_unix_ns - window.start_unix_ns for window in left) <= 1_500_000_000
    assert all(window.sample_count for window in left)
    assert run_checked("report", part.name, "-f", "folded", "-o", "-", cwd=tmp_path).stdout
    killed = "x.html.part holds the samples from a recording that was killed"
    assert killed in record("-o", "y.html").stderr
    record("-o", "x.html")
    assert names(tmp_path) == ["x.html", "x.html.part", "y.html"]
    assert read_profiles(str(part))


def test_the_part_file_and_the_output_contain_the_same_samples(start, tmp_path):
    """Windows read from the part file during recording are a prefix of the output."""
    running = start("-o", "x.otlp")
    early = wait_for_samples(tmp_path / "x.otlp.part", 2)
    end(running)
    (whole,) = read_profiles(str(tmp_path / "x.otlp"))
    assert names(tmp_path) == ["x.otlp"]

    def times(windows):
        return sorted(t for w in windows for _, s in w.samples for t in s.timestamps_unix_ns)

    limit = early[-1].end_unix_ns
    assert times(early) == [time for time in times([whole]) if time < limit]
    assert whole.start_unix_ns == early[0].start_unix_ns


def test_samples_survive_if_the_output_cannot_be_written_at_the_end(start, tmp_path):
    running = start("-o", "x.html")
    wait_for_samples(tmp_path / "x.html.part", 1)
    # From here on, the process cannot extend any file.
    subprocess.run(["prlimit", f"--pid={running.pid}", "--fsize=0:0"], check=True)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "error: cannot write x.html: File too large" in errors
    assert "x.html.part holds the samples taken so far" in errors
    assert names(tmp_path) == ["x.html.part"]
    assert read_profiles(str(tmp_path / "x.html.part"))


@pytest.mark.long
def test_repeated_recordings_do_not_overwrite_each_other(record, tmp_path):
    for name in ("profile.html", "profile-2.html", "profile-3.html"):
        assert record().stderr.splitlines()[-1].startswith(f"wrote {name}: ")
    record("-f", "speedscope")
    assert names(tmp_path) == [
        "profile-2.html", "profile-3.html", "profile.html", "profile.speedscope.json",
    ]  # fmt: skip


def test_simultaneous_recordings_do_not_write_to_the_same_file(start, tmp_path):
    first, second = start(), start()
    done = run_command("record", *SHORT, "-o", "profile.html", "--force", cwd=tmp_path)
    assert done.returncode == 1
    assert "another recording is being written to profile.html" in done.stderr
    assert "wrote profile-2.html" in end(second)
    assert "wrote profile.html" in end(first)
    assert names(tmp_path) == ["profile-2.html", "profile.html"]


def test_a_number_is_appended_to_the_output_file_name_if_the_file_already_exists(start, tmp_path):
    running = start("-o", "x.folded")
    (tmp_path / "x.folded").write_text("precious")
    assert "wrote x-2.folded" in end(running)
    assert (tmp_path / "x.folded").read_text() == "precious"
    assert names(tmp_path) == ["x-2.folded", "x.folded"]


@pytest.mark.parametrize("force", [[], *further(["--force"])])
def test_output_is_written_to_devices_and_pipes(record, tmp_path, force):
    os.mkfifo(tmp_path / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    got = {}

    def read_fifo():
        got["fifo"] = (tmp_path / "fifo").read_bytes()

    def read_socket():
        connected, _ = listener.accept()
        with connected, connected.makefile("rb") as stream:
            got["socket"] = stream.read()

    threads = [threading.Thread(target=read, daemon=True) for read in (read_fifo, read_socket)]
    for thread in threads:
        thread.start()
    for name in ("fifo", "socket", "/dev/null"):
        record("-f", "folded", "-o", name, *force)
    for thread in threads:
        thread.join()
    listener.close()
    assert all(b";" in got[name] for name in ("fifo", "socket"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert names(tmp_path) == ["fifo", "socket"]


def test_standard_output_may_be_a_non_empty_file(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before\n")
        log.flush()
        words = ["record", *SHORT, "--stacks", "both", "-f", "folded", "-o", "/dev/stdout"]
        run_checked(*words, capture_output=False, stdout=log, stderr=subprocess.PIPE, cwd=tmp_path)
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert first == "before"
    assert rest


def test_an_output_symlink_is_followed_and_not_replaced(record, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.folded").symlink_to("there/x.folded")
    for force in ([], ["--force"]):
        record("-o", "link.folded", *force)
    assert (tmp_path / "link.folded").is_symlink()
    assert names(tmp_path / "there") == ["x.folded"]


@pytest.mark.parametrize(
    "name", ["x.Folded.GZ", "x.pb", *further("x.FOLDED", "x.pb.gz", "x.json.gz")]
)
def test_output_file_suffixes_are_case_insensitive_and_may_include_gz(record, tmp_path, name):
    record("-o", name)
    content = (tmp_path / name).read_bytes()
    if name.lower().endswith("gz") or ".pb" in name:
        content = gzip.decompress(content)
    if "json" in name:
        assert json.loads(content)["resourceProfiles"]
    if "folded" in name.lower():
        assert all(line.rpartition(b" ")[2].isdigit() for line in content.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ["--raw", "x.html", "-o", "x.html"],
        ["--raw", "./profile.html"],
        ["--replay", "x.raw", "-o", "x.raw", "-f", "html", "--force"],
    ],
)
def test_two_outputs_cannot_refer_to_the_same_file(tmp_path, words):
    (tmp_path / "x.raw").write_bytes(b"precious")
    done = run_command("record", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "are the same file" in done.stderr
    assert (tmp_path / "x.raw").read_bytes() == b"precious"
    assert names(tmp_path) == ["x.raw"]
