"""``top`` on a real terminal shows what is running, and restores the terminal."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from programs import load, run
from samplers import spawned
from terminals import Terminal

from otel_kprofiler.cli.main import main
from tests.commands import COMMAND, run_checked
from tests.waiting import wait_until

pytestmark = pytest.mark.live

TOP = [*COMMAND, "top"]
BUSY = """
import os
def planted_hot_function():
    while True:
        os.listdir({directory!r})
planted_hot_function()
"""


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("busy")
    (folder / "planted.py").write_text(BUSY.format(directory=os.path.dirname(os.__file__)))
    with spawned(sys.executable, folder / "planted.py") as load:
        yield load


def read_total(text, name):
    """Returns a function's total on a screen, in percent."""
    (row,) = [line for line in text.splitlines() if line.endswith(name)]
    return float(row.split()[1].rstrip("%"))


def test_top_shows_a_busy_function_and_its_process(busy):
    with Terminal([*TOP, "-p", busy.pid, "-F", "199", "--window", "2s"]) as terminal:
        terminal.wait_for("samples/s", "[self]", "lost 0")
        terminal.type("T/planted_hot\r")
        terminal.wait_for("/planted_hot ", "planted_hot_function")

        def is_hot():
            terminal.read(0.2)
            return read_total(terminal.page.text, "planted_hot_function") >= 90

        wait_until(is_hot, say=lambda: terminal.page.text)
        terminal.type("\x1b[B\r")
        terminal.wait_for("callers of planted_hot_function", "callees of planted_hot_function")
        terminal.type("\x1b")
        terminal.type("p")
        terminal.wait_for(f"({busy.pid})", "process")
        terminal.type("s")
        terminal.wait_for("getdents64")
        terminal.type(" ")
        frozen = terminal.wait_for("FROZEN").splitlines()[1:]
        terminal.resize(30, 8)
        terminal.wait_for("FROZEN", "kernel entry")
        terminal.resize(80, 24)
        terminal.wait_for("FROZEN", frozen[1])
        assert terminal.page.text.splitlines()[1:] == frozen
        assert {"?1049"} <= terminal.page.modes
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.settings() == terminal.before
        assert terminal.page.modes == {"?25", "?7"}  # visible cursor, wrapping


def test_a_hangup_restores_the_terminal(busy):
    with Terminal([*TOP, "-p", busy.pid, "--no-python", "--stacks", "kernel"]) as terminal:
        terminal.wait_for("q quit")
        assert terminal.settings() != terminal.before
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.end() == 129
        assert terminal.settings() == terminal.before
        assert terminal.page.modes == {"?25", "?7"}


def test_suspending_top_restores_the_terminal_until_top_is_resumed(busy):
    words = " ".join([*TOP, "-p", str(busy.pid), "--stacks", "kernel", "--no-python"])
    script = f"set -m; {words}; echo has stopped; stty -a | grep icanon; read line; fg; echo now $?"
    with Terminal(["bash", "-c", script]) as terminal:
        terminal.wait_for("q quit")
        terminal.type("\x1a")
        terminal.wait_for("has stopped", " icanon")
        assert "?1049" not in terminal.page.modes
        assert "-icanon" not in terminal.page.text
        terminal.type("\n")
        terminal.wait_for("q quit", "[self]")
        assert "?1049" in terminal.page.modes
        terminal.type("q")
        terminal.wait_for("now 0")
        assert terminal.end() == 0


def test_the_terminal_is_restored_before_an_error_is_shown(busy, tmp_path):
    program = (
        "import otel_kprofiler.cli.top as top\n"
        "def page(*words, **more): raise RuntimeError('planted error')\n"
        "top.page = page\n"
        "from otel_kprofiler.cli.main import main\n"
        f"main(['top', '--stacks', 'kernel', '-p', '{busy.pid}'])\n"
    )
    with Terminal([sys.executable, "-c", program]) as terminal:
        assert terminal.end() == 1
        assert "planted error" in terminal.page.text
        assert terminal.settings() == terminal.before
        assert terminal.page.modes == {"?25", "?7"}


def test_sigterm_ends_top_even_if_the_terminal_accepts_no_output(busy):
    with Terminal([*TOP, "-p", busy.pid, "--stacks", "kernel", "--window", "1s"]) as terminal:
        terminal.wait_for("q quit")
        terminal.type("\x13")  # Ctrl-S
        time.sleep(1.2)  # until the next screen is due
        terminal.process.terminate()
        assert terminal.end() == 143
        assert terminal.settings() == terminal.before


def test_top_exits_when_its_terminal_closes(busy):
    with Terminal(
        ["env", "--ignore-signal=HUP", *TOP, "-p", busy.pid, "--stacks", "kernel"]
    ) as terminal:
        terminal.wait_for("q quit")
        terminal.hang_up()
        assert terminal.process.wait(60) == 129


def test_the_targets_exit_is_shown_and_ctrl_c_restores_the_terminal():
    short = subprocess.Popen(["sleep", "30"])
    with short, Terminal([*TOP, "-p", short.pid, "--stacks", "kernel"]) as terminal:
        terminal.wait_for("q quit")
        assert terminal.settings() != terminal.before
        short.kill()
        short.wait()
        terminal.wait_for("ENDED")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.settings() == terminal.before
        assert terminal.page.modes == {"?25", "?7"}


def test_the_once_option_prints_a_plain_table(busy):
    words = ["--once", "--window", "3s", "--by", "syscall", "-n", 3, "-p", busy.pid]
    done = run_checked("top", *words)
    head, columns, *rows = done.stdout.splitlines()
    assert "99 Hz" in head
    assert columns.split() == ["share", "ms/s", "kernel", "entry"]
    assert "getdents64" in [row.split()[-1] for row in rows]
    assert "\x1b" not in done.stdout


def test_top_by_bpf_lists_a_running_bpf_program_first():
    fd, stopped = load(name="planted_bpf", spin=2000), threading.Event()

    def spin():
        while not stopped.is_set():
            run(fd, 10_000)

    thread = threading.Thread(target=spin)
    thread.start()
    words = ["--batch", "--window", "1s", "--by", "bpf", "-p", str(os.getpid())]
    try:
        with subprocess.Popen([*TOP, *words], stdout=subprocess.PIPE, text=True) as process:
            lines, heads = [], 0
            for line in process.stdout:
                if " Hz " in line:
                    heads += 1
                    # On a busy machine, the BPF program might not run in the first window.
                    if heads > 1 and any("planted_bpf" in text for text in lines):
                        break
                    lines.clear()
                lines.append(line.rstrip())
            process.send_signal(signal.SIGINT)
            process.stdout.close()
            assert process.wait(60) == 0
    finally:
        stopped.set()
        thread.join()
        os.close(fd)
    assert heads > 1
    _, columns, first, *_ = filter(None, lines)  # samples between two runs may add rows
    assert columns.endswith("function of a BPF program")
    assert first.endswith("planted_bpf")
    assert "xdp" in first


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 1, "standard output is not a terminal\nfix: use --once"),
        (["--window", "0s"], 2, "between 1s and 60s"),
        (["--once", "--batch"], 2, "--once cannot be combined"),
        (["--once", "-p", str(2**30)], 1, "there is no process"),
        (["--once", "--window", "61s"], 2, "between 1s and 60s"),
        (["--once", "--service", "shop"], 2, "--service needs --from"),
        (["--once", "--from", "x", "-F", "9"], 2, "--from cannot be combined with --rate"),
        (["--once", "--from", "x", "--no-python"], 2, "--from cannot be combined with --python"),
        (["--once", "--from", "x"], 1, "x is not a ClickHouse address"),
    ],
)
def test_invalid_top_options_are_reported(words, status, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["top", *words])
    assert end.value.code == status
    assert message in capsys.readouterr().err


def test_a_dumb_terminal_is_rejected(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit) as end:
        main(["top"])
    assert end.value.code == 1
    assert "TERM" in capsys.readouterr().err
