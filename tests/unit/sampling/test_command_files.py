"""The files that a command maps at startup are predicted before the command runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from otel_kprofiler.sampling.command_files import find_command_files

pytestmark = pytest.mark.system

MAPS = "print(*{line.split()[-1] for line in open('/proc/self/maps') if ' r-xp ' in line})"


def script(path, line):
    path.write_text(f"{line}\n:\n")
    path.chmod(0o755)
    return str(path)


def test_all_files_that_a_program_maps_as_code_are_predicted():
    mapped = subprocess.check_output([sys.executable, "-I", "-S", "-c", MAPS], text=True).split()
    files = {path for path in mapped if path.startswith("/")}
    assert files <= {os.path.realpath(path) for path in find_command_files(sys.executable)}


def test_a_scripts_files_include_those_of_its_interpreter(monkeypatch, tmp_path):
    shell = find_command_files("/bin/sh")
    assert len(shell) > 1
    inner = script(tmp_path / "inner", "#! /bin/sh -e")
    outer = script(tmp_path / "outer", f"#!{inner}")
    assert find_command_files(outer) == (outer, inner, *shell)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    by_env = script(tmp_path / "by_env", "#!/usr/bin/env -S sh -e")
    assert find_command_files(by_env) == (by_env, *find_command_files(shutil.which("sh")))


@pytest.mark.parametrize(
    "content",
    [b"", b"#!", b"#!/none/such", b"#!/usr/bin/env", b"text", b"\x7fELF\x02", b"#!'", b"\x7fELF"],
)
def test_only_the_program_itself_is_returned_if_its_format_is_invalid_or_unknown(tmp_path, content):
    path = tmp_path / "program"
    path.write_bytes(content)
    assert find_command_files(str(path)) == (str(path),)


def test_libraries_are_omitted_if_the_dynamic_linker_fails(tmp_path):
    linker = find_command_files("/bin/sh")[-1].encode()
    path = tmp_path / "program"
    path.write_bytes(Path("/bin/sh").read_bytes().replace(linker, b"/none" + linker[5:]))
    assert find_command_files(str(path)) == (str(path),)


def test_no_files_are_predicted_for_a_missing_program(tmp_path):
    assert find_command_files(str(tmp_path / "none")) == ()
