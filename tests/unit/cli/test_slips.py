"""The error for an unknown command suggests what the user probably meant."""

import pytest

from otel_kprofiler.cli.main import cli, main
from tests.commands import invoke


@pytest.mark.parametrize(("slip", "meant"), [("reprot", "report"), ("recrod", "record")])
def test_a_similar_command_is_suggested(slip, meant):
    output = invoke(cli, slip, "-h", status=2).output
    assert f"no such command: '{slip}'; did you mean {meant}?" in output


def test_no_command_is_suggested_for_a_word_unlike_any_command():
    assert "did you mean" not in invoke(cli, "xyzzy", status=2).output


@pytest.mark.parametrize(("word", "fix"), [("5s", "use -d 5s"), ("5", "use -d 5"), ("x5", "PATH")])
def test_a_duration_in_place_of_a_command_yields_a_hint(monkeypatch, capsys, tmp_path, word, fix):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["record", word])
    assert ended.value.code == 127
    cause, hint = capsys.readouterr().err.splitlines()
    assert cause == f"error: {word}: command not found"
    assert fix in hint
