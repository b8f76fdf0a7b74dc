"""``dump`` selects threads before it reads their stacks."""

import os

from click.testing import CliRunner

from otel_kprofiler.cli.dump import command


def test_a_thread_name_may_contain_any_bytes():
    done = CliRunner().invoke(command, ["--comm", os.fsdecode(b"no\xffsuch")])
    assert "there is no thread named no" in str(done.exception)
