"""The error for an unknown command suggests what the user probably meant."""

import pytest
from click.testing import CliRunner

from otel_kprofiler.cli.main import cli, main


@pytest.mark.parametrize(("slip", "meant"), [("reprot", "report"), ("recrod", "record")])
def test_a_similar_command_is_suggested(slip, meant):
    said = CliRunner().invoke(cli, [slip, "-h"])
    assert said.exit_code == 2
    assert f"no such command: '{slip}'; did you mean {meant}?" in said.output


def test_no_command_is_suggested_for_a_word_unlike_any_command():
    assert "did you mean" not in CliRunner().invoke(cli, ["xyzzy"]).output


@pytest.mark.parametrize(("word", "fix"), [("5s", "use -d 5s"), ("5", "use -d 5"), ("x5", "PATH")])
def test_a_duration_in_place_of_a_command_is_recognized(monkeypatch, capsys, tmp_path, word, fix):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["record", word])
    assert ended.value.code == 127
    cause, hint = capsys.readouterr().err.splitlines()
    assert cause == f"error: {word}: command not found"
    assert fix in hint
