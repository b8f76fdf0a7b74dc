"""``--version`` prints the versions that a bug report needs, and shell completion works."""

import platform
import re

import pytest

from otel_kprofiler.bpf import LibbpfLoader
from otel_kprofiler.cli.main import cli
from otel_kprofiler.version import __version__
from tests.commands import invoke, run_python

pytestmark = pytest.mark.system


def test_the_version_option_prints_the_loader_interpreter_and_kernel_versions():
    said = invoke(cli, "--version")
    assert re.fullmatch(
        rf"otel-kprofiler {re.escape(__version__)} \((libbpf [0-9.]+|bcc|no loader), CPython"
        rf" {platform.python_version()}(, compiled modules)?,"
        rf" Linux {re.escape(platform.release())} \w+\)\n",
        said.output,
    )
    assert LibbpfLoader.find_version() in said.output


def test_commands_restore_sigchld_if_their_parent_ignored_it():
    code = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from otel_kprofiler.cli import main
try:
    main()
finally:
    print(signal.getsignal(signal.SIGCHLD).name)
"""
    assert run_python(code, "--version").splitlines()[-1] == "SIG_DFL"


@pytest.mark.parametrize(
    ("words", "expected"), [("rec", "record"), ("record --du", "--duration"), ("symb", "symbolize")]
)
def test_shells_complete_commands_and_options(words, expected):
    environment = {
        "_OTEL_KPROFILER_COMPLETE": "bash_complete",
        "COMP_WORDS": f"otel-kprofiler {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    code = "from otel_kprofiler.cli import main; main()"
    assert run_python(code, env=environment).splitlines() == [f"plain,{expected}"]
