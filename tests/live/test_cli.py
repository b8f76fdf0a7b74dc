"""Runs the commands on this host as a user would."""

import contextlib
import gzip
import json
import os
import pty
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections import Counter

import pytest
from programs import recording
from samplers import spawned

from otel_kprofiler.cli.main import main
from otel_kprofiler.formats import FORMATS
from otel_kprofiler.otlp import check_file, read_profiles
from tests.commands import COMMAND, run_checked, run_command
from tests.further import further, further_of
from tests.public import as_nobody
from tests.waiting import wait_until
from tests.windows import read_samples

pytestmark = pytest.mark.live

SUFFIXES = [row.suffix[1:] for row in FORMATS]


def busy():
    return spawned("nice", sys.executable, "-m", "benchmarks.mixed_load", "120")


@pytest.mark.parametrize("words", [["-d", "1s"], ["--", "sleep", "1"]])
def test_a_progress_bar_is_shown_on_a_terminal(tmp_path, words):
    master, slave = pty.openpty()
    command = [*COMMAND, "record", "-o", tmp_path / "x.html", *words]
    with subprocess.Popen(command, stderr=slave) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(master, 4096):
                shown += chunk
    os.close(master)
    assert process.returncode == 0
    assert b" samples, 0 lost" in shown
    assert (b"####" in shown) == ("-d" in words)
    assert shown.splitlines()[-1].startswith(b"wrote ")


@pytest.mark.parametrize("suffix", further_of(SUFFIXES, ("html", "otlp")))
def test_the_suffix_of_the_output_file_selects_the_format(tmp_path, suffix):
    """Also checks that unusual process names do not corrupt a recording."""
    program = os.path.join(os.fsencode(tmp_path), b"\xff\x1b[2J")
    shutil.copy(shutil.which("dd"), program)
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    path = outputs / f"x.{suffix}"
    words = [program, "if=/dev/zero", "of=/dev/null", "bs=4M", "count=400", "status=none"]
    options = ["-F", "499", "--stacks", "both", "-o", path]
    command = [*COMMAND, "record", *options, "--", *words]  # the program's name is not UTF-8
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"wrote {path}: ")
    assert "lost 0" in done.stderr
    assert path.stat().st_size > 100
    assert [entry.name for entry in outputs.iterdir()] == [path.name]
    if "otlp" in suffix:
        assert check_file(str(path)) == []
        run_checked("check", path)
    content = path.read_bytes()
    if suffix == "pprof":
        content = gzip.decompress(content)
    elif suffix == "txt":
        return  # the format has no process names
    assert b"\\xff" in content or b"\\\\xff" in content
    if suffix == "folded":
        assert b"\x1b" not in content


def test_a_busy_host_is_recorded_without_loss(tmp_path):
    path = tmp_path / "x.otlp"
    with busy():
        # The ring can buffer samples for a few seconds while ``record`` is not running.
        done = run_checked("record", "-d", "0.5s", "-F", 49, "--stacks", "both", "-o", path)
    assert done.stderr.splitlines()[-1].startswith(f"wrote {path}: ")
    assert "lost 0" in done.stderr
    assert check_file(str(path)) == []


def test_only_the_command_and_its_children_are_recorded(tmp_path):
    path = tmp_path / "x.folded"
    with busy():
        run_checked("record", "-F", 999, "-o", path, "--", "sh", "-c", "find /usr/lib | md5sum")
    processes = {line.split(";")[0] for line in path.read_text().splitlines()}
    assert "find" in processes
    assert processes <= {"find", "md5sum", "sh", "dash"}


def test_the_output_is_checked_before_sampling_starts(tmp_path):
    (tmp_path / "there.html").write_text("precious")
    done = run_command("record", "-d", "1h", "-o", tmp_path / "there.html")
    assert done.returncode == 1
    assert "--force" in done.stderr
    done = run_command("record", "-d", "1h", "-o", tmp_path / "no/such/x.html")
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write")
    assert run_command("record", "-o", tmp_path / "x.unknown").returncode == 1
    assert (tmp_path / "there.html").read_text() == "precious"


def test_output_with_kernel_addresses_is_readable_only_by_its_owner(tmp_path):
    raw, pprof, html = (tmp_path / name for name in ("a.raw", "a.pprof", "a.html"))
    run_checked("record", "-d", "0.3s", "--idle", "-o", pprof, "--raw", raw)
    run_checked("record", "--replay", raw, "-o", html)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (raw, pprof, html)]
    umask = os.umask(0)
    os.umask(umask)
    assert modes == [0o600, 0o600, 0o666 & ~umask]


@pytest.mark.parametrize("by", [signal.SIGTERM, *further(signal.SIGINT, signal.SIGHUP)])
def test_the_output_is_written_when_a_signal_ends_the_recording(tmp_path, by):
    path = tmp_path / "x.otlp"
    part = tmp_path / "x.otlp.part"
    with busy(), recording("-d", "60s", "-o", path) as record:
        wait_until(lambda: part.exists() and any(read_profiles(str(part))))
        record.send_signal(by)
        _, errors = record.communicate(timeout=60)
    assert record.returncode == 0, errors
    message = "interrupted" if by is signal.SIGINT else f"ended by {by.name}"
    assert message in errors.splitlines()[-1]
    assert read_samples(path)


def test_a_recording_under_nohup_continues_after_its_terminal_closes(tmp_path):
    path = tmp_path / "x.otlp"
    with recording(
        "-d", "2s", "-o", path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ) as record:
        record.send_signal(signal.SIGHUP)
        _, errors = record.communicate(timeout=60)
    assert record.returncode == 0, errors
    assert "SIGHUP" not in errors


def test_replaying_a_raw_recording_yields_the_same_stacks_and_times(tmp_path):
    raw, recorded, again = (tmp_path / name for name in ("x.raw", "a.otlp", "b.otlp"))
    with busy():
        done = run_checked("record", "-d", "1s", "-F", 499, "--raw", raw, "-o", recorded)
    replayed = run_checked("record", "--replay", raw, "-o", again)
    (first,) = read_profiles(str(recorded))
    (window,) = read_profiles(str(again))
    assert stacks_in(first) == stacks_in(window) != Counter()
    assert abs(window.start_unix_ns - first.start_unix_ns) < 50_000_000
    assert abs(window.end_unix_ns - first.end_unix_ns) < 50_000_000

    def said_of(done):
        return done.stderr.splitlines()[-1].partition(": ")[2].split(", ")

    samples, processes, cpus, _ = said_of(done)[:4]
    assert samples.endswith(" samples")
    assert processes.split()[1] in ("process", "processes")
    assert said_of(replayed)[:3] == [samples, processes, cpus]
    assert said_of(replayed)[3].endswith(" s")


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_a_replay_names_jit_compiled_code(tmp_path):
    raw, recorded, again = (tmp_path / name for name in ("x.raw", "a.otlp", "b.otlp"))
    script = (
        "function hot(n){let s=0;for(let i=0;i<n;i++)s+=i%7;return s}"
        "for(let i=0;;i++){hot(1e6);new Function(`return ${i}`)()}"
    )
    node = ["env", "-C", tmp_path, "node", "--always-sparkplug", "--perf-prof", "-e", script]
    output = ["--force", "--stacks", "both", "--raw", raw, "-o", recorded]
    for seconds in (4, 16, 60):  # on a busy host, the function is optimized and named late
        run_checked("record", "-d", f"{seconds}s", "-F", 499, *output, "--", *node)
        (first,) = map(made_code, read_profiles(str(recorded)))
        hot = [line for line in first if line.function.startswith("JS:*hot ") and line.line]
        if hot and sum(first.values()) > 500:
            break
    assert hot
    run_checked("record", "--replay", raw, "-o", again)
    (window,) = map(made_code, read_profiles(str(again)))
    # All samples of a stack with pending names are recorded with the names resolved for one sample.
    assert sum(((first - window) + (window - first)).values()) <= 0.05 * sum(first.values())


def made_code(window):
    results = Counter()
    for (*_, frames), count in stacks_in(window).items():
        module, _, lines, _ = frames[0] if frames else ("", 0, (), None)
        if module is None and lines:
            results[lines[0]] += count
    return results


def stacks_in(window):
    results = Counter()
    for _, sample in window.samples:
        frames = tuple(
            (frame.module and frame.module.name, frame.address, frame.lines, frame.side)
            for frame in sample.stack.frames
        )
        count = len(sample.timestamps_unix_ns)
        results[sample.cpu, sample.tid, sample.thread_name, frames] += count
    return results


@pytest.mark.parametrize(
    "words", [["-d", "1s"], ["-F", "19"], ["-p", "1"], ["--idle"], ["--raw", "x"], ["--", "true"]]
)
def test_sampling_options_cannot_be_combined_with_a_replay(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["record", "--replay", "a.raw", *words])
    assert end.value.code == 2
    assert "--replay cannot be combined with" in capsys.readouterr().err


def test_symbolize_resolves_names_and_addresses():
    result = json.loads(run_command("symbolize", "--json", "vfs_read").stdout)
    (line,) = run_command("symbolize", "--json", result["address"]).stdout.splitlines()
    back = json.loads(line)
    assert (back["function"], back["module"], back["rva"]) == ("vfs_read", "vmlinux", result["rva"])
    assert run_command("symbolize", "no_such_symbol").returncode == 1


def test_invalid_arguments_result_in_exit_status_2_without_a_traceback():
    for words in (["record", "-d", "5 minutes"], ["record", "--cpus", "x"], ["nonsense"], ["run"]):
        done = run_command(*words)
        assert done.returncode == 2, words
        assert "Traceback" not in done.stderr


def test_help_takes_little_cpu_time():
    def used_s():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    took = []
    for _ in range(5):
        before = used_s()
        run_checked("--help")
        took.append(used_s() - before)
    assert min(took) < 0.5


def record_as_nobody(python, directory, *capabilities):
    words = ["record", "-d", "0.5s", "-F", "499", "-o", "x.otlp"]
    with busy():
        return run_command(*words, by=[*as_nobody(*capabilities), python.command], cwd=directory)


@pytest.fixture
def nobodys(tmp_path):
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents:
        if parent.owner() == "root" and str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    return tmp_path


def unresolved(text):
    return float(text.rpartition("unresolved ")[2].split("%")[0])


def test_three_capabilities_are_enough_to_record(public_python, nobodys):
    done = record_as_nobody(public_python, nobodys, "bpf", "perfmon", "syslog")
    assert done.returncode == 0, done.stderr
    assert unresolved(done.stderr) < 1


@pytest.mark.long
def test_without_cap_syslog_unresolved_frames_include_the_reason(public_python, nobodys):
    done = record_as_nobody(public_python, nobodys, "bpf", "perfmon")
    assert done.returncode == 0, done.stderr
    samples = read_samples(nobodys / "x.otlp")
    frames = [frame for _, sample in samples for frame in sample.stack.frames]
    assert frames
    assert all(frame.lines or frame.unresolved for frame in frames)


def test_recording_without_capabilities_prints_a_fix_and_writes_nothing(public_python, nobodys):
    done = record_as_nobody(public_python, nobodys)
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert "CAP_BPF" in done.stderr
    assert "CAP_PERFMON" in done.stderr
    assert "fix: " in done.stderr
    assert list(nobodys.iterdir()) == []
