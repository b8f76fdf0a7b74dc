"""The output of ``record`` and ``report -o``."""

import pytest

from otel_kprofiler.cli.output import Output


@pytest.mark.parametrize("path", ["/dev/null", "-"])
def test_no_command_is_suggested_for_an_output_that_is_not_a_regular_file(path):
    """The command is printed after the output was closed."""
    with Output(path, "folded", force=False) as output:
        assert output.is_special
    assert output.next_step == ""


def test_a_command_is_suggested_for_a_file(tmp_path):
    path = str(tmp_path / "a.folded")
    with Output(path, None, force=False) as output:
        output.write([])
    assert output.next_step == f"flamegraph.pl {path} > profile.svg"
