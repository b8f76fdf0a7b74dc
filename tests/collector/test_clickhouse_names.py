"""Names that look like SQL, placeholders, patterns or HTML survive the gateway and ClickHouse."""

import gc
import json
from fnmatch import fnmatchcase

import pytest
from click.testing import CliRunner

from otel_kprofiler.cli.report import command
from otel_kprofiler.errors import KProfilerError
from otel_kprofiler.model import (
    USER_SIDE,
    FileId,
    Frame,
    Line,
    Module,
    ModuleKind,
    SpanLink,
    Stack,
    WindowSample,
)
from otel_kprofiler.otlp import encode_window
from tests.collector.conftest import VERSIONS, build
from tests.collector.test_clickhouse import NEEDS_ENGINE, SECOND, START, TABLE, engine, gateway, run
from tests.windows import make_window

__all__ = ["engine"]  # a fixture

pytestmark = NEEDS_ENGINE
NAMES = [
    "plain", r"latin\xff", "it's", 'a"b', "back\\slash", "end\\", "\\'", "{x:String}", "{x}", "%s",
    "100%", "a_b", "axb", "a-b", "a*b", "a?b", "[ab]", "a", "a\nb", "a\r\nb", "a\tb", "nul\0nul",
    "' OR '1'='1", "'; DROP TABLE otel.otel_profiles; --", "/* x", "-- x", "x -- ", "` OR 1 OR `",
    "$$x$$", ";", "\u202egnp.exe", "a\u2028b", "</script><!--", "\x1b[31mred", "name\U0001f600",
    "n" * 4000,
]  # fmt: skip
HOSTILE = [
    "it's", "end\\", "\\'", "{x:String}", "100%", "a_b", "a*b", "[ab]", "nul\0nul", "' OR '1'='1",
    "'; DROP TABLE otel.otel_profiles; --",
]  # fmt: skip
OPTIONS = ["--process", "--thread", "--service", "--endpoint", "--function", "--attribute"]
PERIOD_NS = 10_000_000
NOT_UTF8 = "latin\udcff"  # as Python decodes a non-UTF-8 argument


def window():
    """Returns a window with one process per name; sample counts differ between processes."""
    groups = []
    for at, name in enumerate(NAMES):
        code = Module(name, ModuleKind.USER, None, FileId(""), 0)
        frame = Frame(code, 0x1000 + at, (Line(name, "", name, 7),), 0, USER_SIDE)
        link = SpanLink(bytes(range(16)), (at + 1).to_bytes(8, "big"), name)
        sample = WindowSample(
            Stack.from_frames([frame]), 5000 + at, name, 0, link,
            [START + at * 1000 + turn for turn in range(at + 1)], labels=(("tenant", name),),
        )  # fmt: skip
        resource = {
            "process.executable.name": name, "process.pid": 1000 + at, "service.name": name,
            "container.name": name, "host.name": "h",
        }  # fmt: skip
        groups.append((resource, [sample]))
    return make_window(START, START + SECOND, *groups, period_ns=PERIOD_NS)


SAMPLES = sum(range(len(NAMES) + 1))


@pytest.fixture(scope="module")
def stored(engine, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gateway")
    source = directory / "sent.otlp"
    parts = [batch.payload for batch in encode_window(window()).batches]
    source.write_bytes(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    with gateway(build(VERSIONS[0]), engine, directory) as (grpc, _, _):
        run("send", source, grpc)
        engine.wait_for(SAMPLES)
    return source


def counts(source, *words):
    try:
        words = ["--json", "--limit", "0", *words, str(source), "--from", "0s"]
        done = CliRunner().invoke(command, words, catch_exceptions=False)
    except KProfilerError as error:
        if "no sample matches" not in error.message:
            raise
        return {}
    finally:
        gc.enable()  # the command disables garbage collection
    groups = [group for kind in json.loads(done.stdout)["kinds"] for group in kind["groups"]]
    return {group["name"]: group["self"] // PERIOD_NS for group in groups}


@pytest.mark.parametrize("by", ["service", "function", "endpoint", "process", "thread"])
def test_names_are_read_back_from_clickhouse_unchanged(engine, stored, by):
    number = {"process": 1000, "thread": 5000}.get(by)
    expected = {
        f"{name} ({number + at})" if number else name: at + 1 for at, name in enumerate(NAMES)
    }
    assert counts(engine.address(), "--by", by) == expected


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_filter_patterns_match_hostile_names_exactly(engine, stored, option):
    for pattern in NAMES if option == "--service" else HOSTILE:
        expected = {
            name: at + 1
            for at, name in enumerate(NAMES)
            if name == pattern or fnmatchcase(name, pattern)
        }
        value = f"tenant={pattern}" if option == "--attribute" else pattern
        assert counts(engine.address(), option, value, "--by", "service") == expected, pattern
    ((left,),) = engine.ask(f"SELECT sum(length(TimestampsUnixNano)) FROM {TABLE}")
    assert int(left) == SAMPLES


@pytest.mark.parametrize("option", [*OPTIONS, "--container", "--module"])
def test_a_filter_with_non_utf8_bytes_matches_their_escaped_form(engine, stored, option):
    value = f"tenant={NOT_UTF8}" if option == "--attribute" else NOT_UTF8
    expected = {r"latin\xff": NAMES.index(r"latin\xff") + 1}
    for source in (engine.address(), stored):
        assert counts(source, option, value, "--by", "service") == expected


@pytest.mark.parametrize("option", ["--span", "--kind"])
def test_names_with_non_utf8_bytes_match_no_other_name(engine, stored, option):
    assert counts(engine.address(), option, NOT_UTF8) == counts(stored, option, NOT_UTF8) == {}
