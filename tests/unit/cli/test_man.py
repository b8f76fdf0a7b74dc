"""The manual pages in docs/man are complete and up to date."""

import json
import re
import shutil
import subprocess

import click
import pytest

from otel_kprofiler.cli.main import COMMANDS, cli
from tests import man
from tests.commands import run_python

pytestmark = pytest.mark.system

SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"]


def test_the_man_pages_are_up_to_date():
    written = {path.name: path.read_text() for path in man.FOLDER.iterdir()}
    if any(not text.startswith(man.MADE_WITH) for text in written.values()):
        pytest.skip("the manual pages were made with another version of click")
    # Use a new process, because click caches help options that earlier tests requested.
    program = "import json, sys; from tests import man; json.dump(man.pages(), sys.stdout)"
    output = run_python(program, cwd=man.FOLDER.parents[1])
    assert written == json.loads(output), "run make generated"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_has_a_page_with_its_options(name):
    page = (man.FOLDER / f"{man.PROGRAM}{'-' * bool(name)}{name}.1").read_text()
    assert re.findall("^.SH (.*)$", page, re.MULTILINE)[: len(SECTIONS)] == SECTIONS
    command = cli.get_command(click.Context(cli), name) if name else cli
    options = [
        param for param in command.params if isinstance(param, click.Option) and not param.hidden
    ]
    for known in ["--help", *(known for option in options for known in option.opts)]:
        assert rf"\fB{man.escape(known)}\fR" in page


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
@pytest.mark.parametrize("path", sorted(man.FOLDER.iterdir()), ids=lambda path: path.stem)
def test_groff_formats_the_pages_without_warnings(path):
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path.stem.upper()}(1)")


def test_text_in_man_pages_is_not_interpreted_as_roff_requests():
    assert man.escape(".so /etc/passwd \\n") == "\\&.so /etc/passwd \\en"
    assert man.names("-n, --limit COUNT-ER") == r"\fB\-n\fR, \fB\-\-limit\fR COUNT-ER"
