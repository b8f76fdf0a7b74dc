"""Runs this package's commands in tests, as users would."""

import subprocess
import sys

from click.testing import CliRunner

COMMAND = [sys.executable, "-m", "otel_kprofiler"]


def run_command(*words, by=(sys.executable,), **options):
    """Runs a command until it exits, and returns its status and its output (text by default).

    ``by`` is the interpreter's command, which may start with a wrapper such as setpriv.
    """
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run([*by, *COMMAND[1:], *map(str, words)], **options)


def run_checked(*words, **options):
    """Runs a command that must succeed."""
    done = run_command(*words, **options)
    assert done.returncode == 0, done.stderr
    return done


def invoke(command, *words, status=0, **options):
    """Calls a click command in this process, and returns its result, whose status it checks."""
    done = CliRunner().invoke(command, list(map(str, words)), **options)
    assert done.exit_code == status, done.output
    return done


def run_python(code, *words, by=(sys.executable,), **options):
    """Runs Python code in a new interpreter, asserts success, and returns the code's output."""
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    done = subprocess.run([*by, "-c", code, *words], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
