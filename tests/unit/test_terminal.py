"""Commands escape terminal controls in untrusted text."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b1A\u202e\r"


def call(*words):
    return subprocess.run(
        [sys.executable, "-m", "otel_kprofiler", *words],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, check=False,
    )  # fmt: skip


def check(done):
    text = (done.stdout + done.stderr).decode()
    assert "Traceback" not in text
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    return text


@pytest.mark.parametrize(
    "content",
    ['{"receivers: [', '{"%s": 1}', '{"exporters": {"otlp_grpc": {"endpoint": "%s"}}}',
     '{"receivers": {"%s": {}}, "service": "%s"}'],
)  # fmt: skip
@pytest.mark.parametrize("command", ["validate", "print-config"])
def test_control_characters_in_configurations_are_escaped(tmp_path, command, content):
    path = tmp_path / "agent.yaml"
    path.write_text(content.replace("%s", ESCAPES.encode("unicode_escape").decode()))
    done = call(command, "-c", str(path))
    assert done.returncode == 2
    check(done)


def test_untrusted_names_in_configurations_are_escaped(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff\x1b[2J.yaml")
    assert b"\\xff\\x1b[2J.yaml" in call("validate", "-c", path).stderr
    check(call("validate", "-c", path))


@pytest.mark.parametrize(
    "content",
    ['{"%s": 1}', '{"resourceProfiles": "%s"}', '{"resourceProfiles": [{"schemaUrl": {"%s": 1}}]}',
     '{"dictionary": {"stringTable": ["%s"]}}',
     '{"dictionary": {"stringTable": ["", "%s"], "attributeTable": [{}, {"unitStrindex": 1}]}}'],
)  # fmt: skip
@pytest.mark.parametrize("words", [["check"], ["check", "--json"]])
def test_control_characters_in_payloads_are_escaped(tmp_path, words, content):
    path = os.path.join(os.fsencode(tmp_path), b"\xff\x1b[2J.jsonl")
    with open(path, "wb") as file:
        file.write(content.replace("%s", json.dumps(ESCAPES)[1:-1]).encode())
    done = call(*words, path)
    assert done.returncode in (0, 1)
    check(done)
    if words == ["check"]:
        assert b"\\xff\\x1b[2J.jsonl" in done.stdout + done.stderr
