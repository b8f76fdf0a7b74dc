"""The examples in docs/otlp.md behave as documented."""

import pytest

from otel_kprofiler.model import USER_SIDE, FileId, Frame, Module, ModuleKind, Stack, WindowSample
from otel_kprofiler.otlp import decode_windows, encode_window
from tests.examples import examples, run_example
from tests.windows import make_window

EXAMPLES = examples("otlp.md")


@pytest.fixture(autouse=True)
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(EXAMPLES, "Write a profile")
    return tmp_path / "shop.otlp"


def test_every_documented_example_is_tested():
    assert list(EXAMPLES) == [
        "Write a profile", "Read profiles", "Check payloads", "Split messages of other producers",
        "Add names",
    ]  # fmt: skip


def test_a_written_profile_can_be_read_back(shop, capsys):
    run_example(EXAMPLES, "Read profiles")
    assert capsys.readouterr().out == "on_cpu shop price 3\n"


def test_the_checker_reports_a_rule_violation_only_for_the_invalid_message(capsys):
    given = run_example(EXAMPLES, "Check payloads")
    assert capsys.readouterr().out == given["RULES"][given["wrong"].rule] + "\n"


def test_a_small_message_yields_one_batch(capsys):
    run_example(EXAMPLES, "Split messages of other producers")
    assert capsys.readouterr().out == "1 {}\n"


def test_the_documented_example_adds_names_to_locations(shop, capsys):
    module = Module("libshop.so", ModuleKind.USER, None, FileId("ab" * 16), 0)
    stack = Stack.from_frames([Frame(module, 0x10, (), 0, USER_SIDE)])
    samples = [WindowSample(stack, 1, "t", 0, None, [5])]
    (batch,) = encode_window(make_window(0, 10, ({}, samples))).batches
    shop.write_bytes(batch.payload)
    (named,) = decode_windows(run_example(EXAMPLES, "Add names")["naming"].data)
    assert capsys.readouterr().out == "1 of 1\n"
    ((_, sample),) = named.samples
    assert sample.stack.frames[0].function == "libshop.so+0x10"
