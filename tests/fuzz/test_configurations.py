"""Every problem in an untrusted configuration is reported in bounded time, without a traceback."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.agent import agent_config
from otel_kprofiler.config import PendingConfig, dump_config, load_config, parse_config
from otel_kprofiler.errors import ConfigError
from tests.further import further_of
from tests.fuzz.bounds import REFUSED, read_within

pytestmark = pytest.mark.fuzz

SAMPLE = (Path(__file__).parents[2] / "config" / "agent.yaml").read_text()
ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
RATE = "receivers: {{kprofiler: {{samples_per_second: {}}}}}\n"
BOMBS = {
    "aliases": ALIASES,
    "aliases of keys": ALIASES.replace("[", "{k: [").replace("]", "]}"),
    "merged": "a: &a {k: v}\nb: {<<: [" + "*a, " * 20_000 + "*a]}\n",
    "depth": "[" * 100_000,
    "depth of blocks": "\n".join(" " * depth + "k:" for depth in range(600)),
    "depth of maps": "{k: " * 500 + "1" + "}" * 500,
    "decimal": RATE.format("9" * 5000),
    "hexadecimal": RATE.format("0x" + "f" * 100_000),
    "float": RATE.format("1." + "0" * 100_000),
    "size": RATE.format(19) + "# " + "x" * 300_000,
    "list": "receivers: {kprofiler: {target_pids: [" + "1, " * 60_000 + "1]}}\n",
    "keys": "".join(f"k{n}: 1\n" for n in range(20_000)),
}


@pytest.mark.parametrize("bomb", further_of(BOMBS, [bomb for bomb in BOMBS if bomb != "list"]))
def test_rejecting_a_yaml_bomb_takes_little_memory_and_time(bomb, tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text(BOMBS[bomb])
    assert read_within(lambda: load_config(str(path), environ={})) == REFUSED


@pytest.mark.parametrize("fork", [False, True])
def test_the_agent_explains_why_it_rejects_an_alias_bomb(fork, tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text(ALIASES)
    with pytest.raises(ConfigError, match="more than 10000 values"):
        PendingConfig(str(path), agent_config, fork=fork).get()


SNIPPETS = [
    "[", "{", "&a ", "*a", "!!int ", "!!binary ", "? ", "- ", "\t", ": ", "'", '"', "\\ud800", "|",
    "${env:X}", "${", "0x", "1e999", ".inf", ".nan", "-1", "9" * 40, "null", "~", "<<", "\0",
    '"\\ud800"', "1:2:3", "2001-01-01", "%YAML 9.9\n---\n", "---\n", "...\n", "@", "`", "\u2028",
]  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SAMPLE)),
            st.integers(0, 30),
            st.sampled_from(SNIPPETS) | st.text(max_size=8),
        ),
        max_size=4,
    ),
    st.text(max_size=20),
)
@settings(max_examples=150, deadline=20_000)
@example([(0, len(SAMPLE), 'receivers: {kprofiler: {resource: {a: "\\ud800"}}}')], "")
@example([(0, len(SAMPLE), "exporters: {file: {path: .nan}}")], "")
@example([(1, 0, "%YAML 9.9\n---\n"), (1, 0, "%YAML 9.9\n---\n")], "")
def test_a_corrupt_configuration_is_loaded_or_rejected(changes, value):
    text = SAMPLE
    for at, cut, new in changes:
        text = text[:at] + new + text[at + cut :]
    with contextlib.suppress(ConfigError):
        dump_config(parse_config(text, path="agent.yaml", environ={"X": value}))
