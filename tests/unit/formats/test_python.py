"""Python functions with arbitrary names, and lines, survive OTLP and appear in every format."""

import gzip
import json

import pytest

from otel_kprofiler.formats import folded, function_rows, html, pprof, speedscope, table
from otel_kprofiler.formats.entries import frame_entries
from otel_kprofiler.model import (
    KERNEL_SIDE,
    PYTHON_SIDE,
    STACK_TRUNCATED,
    Form,
    Frame,
    Line,
    Side,
    Stack,
    Unresolved,
    WindowSample,
)
from tests.windows import make_window, send
from tests.wire import fields

GETDENTS = Frame(None, 1 << 63, (Line("iterate_dir"),), 0, KERNEL_SIDE)
UNKNOWN = Frame(None, 0, (), 0, PYTHON_SIDE, Unresolved.CODE_UNKNOWN)
HOSTILE = 'a;b\n\x1b[31m</script><img src=x onerror=alert(1)>"\u202e\udc80 7'


def python(function, line, start, file="/srv/app/views.py"):
    return Frame(None, 0, (Line(function, "", file, line, start),), 0, PYTHON_SIDE)


def sent(*stacks, form=Form.PROTOBUF):
    samples = [
        WindowSample(stack, number, "python3", 0, None, [5_000])
        for number, stack in enumerate(stacks)
    ]
    attributes = {"process.pid": 7, "process.executable.name": "python3"}
    return send(make_window(5_000, 15_000, (attributes, samples), period_ns=1000), form)


def stack_of(*frames, status=0):
    return Stack((Side(KERNEL_SIDE, (GETDENTS,)), Side(PYTHON_SIDE, frames, status)))


WHOLE = stack_of(python("View.get", 42, 40), UNKNOWN, python("<module>", 7, 1), status=1)


@pytest.mark.parametrize("form", Form)
def test_functions_lines_and_start_lines_survive_an_otlp_round_trip(form):
    (sample,) = sent(WHOLE, form=form).profiles[0].resources[0].samples
    kernel, own = sample.stack.sides
    assert kernel.kind is KERNEL_SIDE
    assert (own.kind, own.status) == (PYTHON_SIDE, STACK_TRUNCATED)
    assert own.frames == WHOLE.sides[1].frames


def test_functions_with_the_same_name_are_distinguished_by_start_line():
    stacks = [stack_of(python("get", 9, start)) for start in (1, 5, 9)]
    samples = sent(*stacks).profiles[0].resources[0].samples
    assert [sample.stack.frames[1].lines[0].start_line for sample in samples] == [1, 5, 9]


@pytest.mark.parametrize(("frame", "label"), [
    (python("View.get", 42, 40), "View.get (views.py:42)"),
    (python("View.get", 0, 40), "View.get (views.py)"),
    (python("f", 3, 1, "<frozen posixpath>"), "f (<frozen posixpath>:3)"),
    (python("f", 3, 1, ""), "f"),
    (python("f", 3, 1, "/srv/"), "f (/srv/:3)"),
    (UNKNOWN, "[python]"),
    (Frame(None, 5, (Line("f", "", "a.c", 3),), 0, KERNEL_SIDE), "f"),
])  # fmt: skip
def test_a_python_frame_is_shown_as_function_and_line(frame, label):
    (entry,) = frame_entries(frame)
    assert entry.label == label


def test_every_format_shows_the_python_line_number():
    windows = [sent(WHOLE)]
    assert folded(windows) == (
        "python3;[truncated]_[p];<module> (views.py:7)_[p];[python]_[p];"
        "View.get (views.py:42)_[p];iterate_dir_[k] 1\n"
    )
    assert all(name in html(windows) for name in ("View.get (views.py:42)", "/srv/app/views.py"))
    assert '"View.get (views.py:42)"' in speedscope(windows)
    frame = json.loads(speedscope(windows))["shared"]["frames"][3]
    assert (frame["file"], frame["line"]) == ("/srv/app/views.py", 42)
    assert {b"View.get", b"/srv/app/views.py", b"[python]"} <= set(strings(pprof(windows)))
    rows = {row.function: row.module for row in function_rows(windows[0].profiles)}
    assert rows["View.get"] == "/srv/app/views.py"


def strings(profile):
    return [text for field, text in fields(gzip.decompress(profile)) if field == 6]


@pytest.mark.parametrize("place", ["function", "file"])
def test_hostile_names_cannot_alter_the_structure_of_any_format(place):
    """Names come from a process's memory and are not trusted."""
    names = {"function": (HOSTILE, "a.py"), "file": ("f", HOSTILE)}[place]
    windows = [sent(stack_of(python(names[0], 3, 1, names[1])))]
    (line,) = folded(windows).splitlines()
    assert line.count(";") == 2
    assert line.endswith(";iterate_dir_[k] 1")
    page = html(windows)
    assert page.count("</script>") == html([sent(WHOLE)]).count("</script>")
    for text in [folded(windows), table(windows), page.partition('type="application/json">')[2]]:
        assert not {"\x1b", "\u202e", "\udc80"} & set(text)
    kept = HOSTILE.replace("\udc80", "\\x80")
    frames = json.loads(speedscope(windows))["shared"]["frames"]
    assert any(kept in frame["name"] + frame.get("file", "") for frame in frames)
    assert any(kept in text.decode() for text in strings(pprof(windows)))
