"""The examples in docs/export.md work as described."""

from pathlib import Path

import pytest

from otel_kprofiler.export import ExportQueue
from otel_kprofiler.otlp import check_file, encode_window
from tests.examples import examples, run_example

pytestmark = pytest.mark.system

EXAMPLES = examples("export.md")


@pytest.fixture
def window(tmp_path, monkeypatch):
    """Returns the example window from docs/otlp.md, in a directory that examples may write to."""
    monkeypatch.chdir(tmp_path)
    return run_example(examples("otlp.md"), "Write a profile")["window"]


def test_every_documented_example_is_tested():
    assert list(EXAMPLES) == [
        "Send a batch", "Settings from the environment", "Export in the background",
        "Your own exporter",
    ]  # fmt: skip


def test_the_example_delivers_a_batch(http_receiver, window, capsys):
    given = run_example(EXAMPLES, "Send a batch", endpoint=http_receiver.endpoint, window=window)
    assert capsys.readouterr().out == f"SUCCESS {window.sample_count} {{}} \n"
    assert len(http_receiver.requests) == len(given["encoded"].batches) == 1


def test_the_environment_selects_the_exporter(http_receiver, capsys):
    run_example(EXAMPLES, "Settings from the environment", endpoint=http_receiver.endpoint)
    assert capsys.readouterr().out == "otlp_http JSON\n"


def test_the_queue_example_delivers_its_batches(window, capsys):
    run_example(EXAMPLES, "Export in the background", window=window, encode_window=encode_window)
    assert capsys.readouterr().out == f"{window.sample_count} {{}}\n"
    assert check_file("profiles.jsonl") == []
    assert list(Path("spool").iterdir())


def test_the_custom_exporter_example_works_with_an_export_queue(window):
    exporter = run_example(EXAMPLES, "Your own exporter")["Memory"]()
    queue = ExportQueue(exporter)
    (batch,) = encode_window(window).batches
    queue.put(batch)
    queue.shutdown()
    assert exporter.payloads == [batch.payload]
    assert queue.counts().exported == window.sample_count
