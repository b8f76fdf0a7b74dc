"""Names are printable on terminals and unchanged in machine-readable formats."""

import gzip
import json
import logging

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from otel_kprofiler.agent import JsonFormatter, make_formatter
from otel_kprofiler.formats import firefox, folded, html, pprof, speedscope, table
from otel_kprofiler.model import (
    USER_SIDE,
    FileId,
    Form,
    Frame,
    Line,
    Module,
    ModuleKind,
    SpanLink,
    Stack,
    WindowSample,
)
from otel_kprofiler.otlp import decode_windows, encode_window
from otel_kprofiler.text import escape_surrogates
from tests.windows import make_window

PARTS = [
    "</script>", "<!--", "<script", "]]>", "'", '"', "\\", "\\x1b", "\x1b[2J", "\x1b]0;x\x07",
    "\x9b",
    "\u202e", "\u2066", "\u200f", "\u2028", "\u2029", "\0", "\r", "\n", "\t", "\udcff", "\ud800",
    "\ufeff", ";", " 7", "&amp;", "${x}", "%s", "n" * 65_536, "\U0001f600",
]  # fmt: skip
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join)
# Names may be up to 64 KiB long.
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def window(name):
    code = Module(name, ModuleKind.USER, None, FileId("ab" * 16), 0)
    frame = Frame(code, 0x1000, (Line(name, "", name, 7),), 0, USER_SIDE)
    link = SpanLink(bytes(range(16)), bytes(range(1, 9)), name)
    sample = WindowSample(
        Stack.from_frames([frame]), 7, name, 0, link, [10], labels=(("label", name),)
    )
    attributes = {
        "process.executable.name": name, "process.pid": 7, "service.name": name,
        "container.name": name, "host.name": name,
    }  # fmt: skip
    return make_window(0, 10**9, (attributes, [sample]), period_ns=10**7)


@SETTINGS
@given(NAMES)
def test_human_readable_formats_consist_of_printable_lines(name):
    one = [window(name)]
    for text in (folded(one, threads=True), table(one, width=100)):
        assert all(map(str.isprintable, text.split("\n")))
    assert folded(one).count("\n") == 1


@SETTINGS
@given(NAMES)
def test_names_cannot_end_the_script_element_in_a_page(name):
    page, plain = html([window(name)]), html([window("plain")])
    for mark in ("</script", "<!--", "<script"):
        assert page.lower().count(mark) == plain.lower().count(mark)
    data = page.partition('type="application/json">')[2].partition("</script>")[0]
    assert all(map(str.isprintable, json.loads(data)["strings"]))


@SETTINGS
@given(NAMES)
def test_machine_readable_formats_preserve_names_exactly(name):
    kept = escape_surrogates(name)
    frames = json.loads(speedscope([window(name)]))["shared"]["frames"]
    assert kept in [frame["name"] for frame in frames]
    assert kept in json.loads(firefox([window(name)]))["shared"]["stringArray"]
    assert kept.encode() in gzip.decompress(pprof([window(name)]))
    for form in Form:
        (batch,) = encode_window(window(name), form=form).batches
        (result,) = decode_windows(batch.payload)
        ((resource, sample),) = result.profiles[0].samples
        (frame,) = sample.stack.frames
        assert {
            sample.thread_name, sample.labels[0][1], frame.lines[0].function, frame.lines[0].file,
            frame.module.name, resource.attributes["container.name"], sample.link.local_root,
        } == {kept}  # fmt: skip


@SETTINGS
@given(NAMES)
@example("\u2028{}\x9b31m\x7f")
def test_a_log_record_that_contains_a_hostile_name_is_written_as_one_line(name):
    record = logging.LogRecord("x", logging.WARNING, "", 0, "of %s", (name,), None)
    assert make_formatter("console", 2).format(record).isprintable()
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert json.loads(line.encode())["message"] == f"of {escape_surrogates(name)}"


def test_a_logged_traceback_keeps_its_line_breaks():
    try:
        int("\x1b[2J\u202e")
    except ValueError as error:
        info = (type(error), ValueError("\x1b[2J\u202e"), error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), info)
    lines = make_formatter("console", 2).format(record).split("\n")
    assert len(lines) > 3
    assert all(map(str.isprintable, lines))
