"""Profiles saved in any format show the same data when they are read back.

A recording is replayed to each format, and to profile files, which ``report`` converts.
"""

import json
import shutil
import sys
from collections import Counter

import pytest
from samplers import spawned
from unwind_maps import compile_c

from otel_kprofiler.formats import FORMATS
from tests.commands import run_checked
from tests.needs import LIBBPF
from tests.page import data

pytestmark = [pytest.mark.live, LIBBPF]

SAVED = [row.suffix for row in FORMATS if row.is_profile]
SHOWN = [row.suffix for row in FORMATS if not row.is_profile]
NAMELESS = """
#include <unistd.h>
static __attribute__((noinline)) unsigned spin(unsigned count)
{
    volatile unsigned value = count;
    for (unsigned at = 0; at < count; at++)
        value = value * 31 + at;
    return value;
}
int main(void)
{
    for (unsigned value = 1;;)
        value += spin(1000000000 + (value & 1)); /* no sample is in main */
}
"""
PYTHON = """
import os, time
def work():
    return sum(number * number for number in range(20_000))
while True:
    work()
    os.listdir("/usr/lib")
    time.sleep(0.005)
"""
SHORT_LIVED = "while :; do /bin/true; done"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Returns a raw recording, its replay in each format, and a profile recorded live."""
    directory = tmp_path_factory.mktemp("recorded")
    with (
        spawned(compile_c(directory / "nameless", NAMELESS, "-O1", "-s")),
        spawned(sys.executable, "-S", "-c", PYTHON),
        spawned(shutil.which("sh"), "-c", SHORT_LIVED),
    ):
        for seconds in (2, 8, 30):  # a busy machine may delay the recording
            words = ["--off-cpu", "-d", f"{seconds}s", "--force", "--raw", "raw"]
            run_checked("record", *words, "-o", "live.otlp", cwd=directory)
            replay(directory, ".folded")
            if has_every_part((directory / "replayed.folded").read_text()):
                break
        else:
            pytest.fail("the recording lacks something that a format may drop")
    for suffix in SAVED + SHOWN:
        replay(directory, suffix)
    return directory


def replay(directory, suffix):
    run_checked("record", "--replay", "raw", "--force", "-o", f"replayed{suffix}", cwd=directory)


def has_every_part(shown):
    starts = {word for word in shown.replace("\n", ";").split(";") if word.startswith("fun_")}
    return starts and all(part in shown for part in ("_[p]", "off_cpu", "on_cpu", "_[k]"))


def read_page(path):
    page = data(path.read_text())
    strings, frames, nodes = page["strings"], page["frames"], page["nodes"]
    texts = {"name", "module", "reason", "file"}
    rows = list(
        zip(
            *([strings[at] for at in column] if name in texts else column
              for name, column in frames.items()),
            strict=True,
        )
    )  # fmt: skip
    stacks = {-1: ()}
    for node, (parent, frame) in enumerate(zip(nodes["parent"], nodes["frame"], strict=True)):
        stacks[node] = (*stacks[parent], rows[frame])
    threads = [
        (strings[name], tid, strings[page["processes"]["name"][process]],
         page["processes"]["pid"][process])
        for name, tid, process in zip(*page["threads"].values(), strict=True)
    ]  # fmt: skip
    samples = Counter()
    columns = page["samples"]
    for node, thread, cpu, kind, bin_, count in zip(
        *(columns[name] for name in ("node", "thread", "cpu", "kind", "bin", "count")), strict=True
    ):
        samples[stacks[node], threads[thread], cpu, kind, bin_] += count
    return page["summary"], page["kinds"], samples


def read_speedscope(path):
    result = json.loads(path.read_text())
    frames = [tuple(sorted(frame.items())) for frame in result["shared"]["frames"]]
    weights = Counter()
    for one in result["profiles"]:
        for stack, weight in zip(one["samples"], one["weights"], strict=True):
            weights[one["name"], one["unit"], tuple(frames[at] for at in stack)] += weight
    return weights


def read_pprof(path):
    """Converts pprof to folded stacks. Addresses are relative if the kernel's base is unknown."""
    converted = path.with_suffix(".converted.folded")
    run_checked("report", "--idle", "--force", path, "-o", converted)
    return converted.read_text()


def read_firefox(path):
    result = json.loads(path.read_text())
    shared = result["shared"]
    funcs = [shared["stringArray"][at] for at in shared["funcTable"]["name"]]
    tables, stacks = (shared["frameTable"], shared["stackTable"]), []
    for at, (frame, offset) in enumerate(
        zip(tables[1]["frame"], tables[1]["prefixOffset"], strict=True)
    ):
        above = stacks[at - offset] if offset else ()
        stacks.append((*above, (funcs[tables[0]["func"][frame]], tables[0]["line"][frame])))
    rows = Counter()
    for thread in result["threads"]:
        track, samples, markers = (
            (thread["name"], thread["tid"]),
            thread["samples"],
            thread["markers"],
        )
        for at, time, weight in zip(
            samples["stack"], samples["time"], samples["weight"], strict=True
        ):
            rows[track, time, weight, None if at is None else stacks[at]] += 1
        for fields, start in zip(markers["data"], markers["startTime"], strict=True):
            cause = fields.get("cause", {}).get("stack")
            rows[track, start, str(fields | {"cause": cause is not None})] += 1
    return rows, result["meta"]["extra"]


READERS = {
    ".firefox.json": read_firefox,
    ".html": read_page,
    ".folded": lambda path: path.read_text(),
    ".txt": lambda path: path.read_text(),
    ".pprof": read_pprof,
    ".speedscope.json": read_speedscope,
}


@pytest.mark.parametrize(
    ("saved", "shown"), [(".otlp", shown) for shown in SHOWN] + [(".otlp.jsonl", ".folded")]
)
def test_a_profile_that_is_read_back_matches_the_recording(recorded, saved, shown):
    converted = recorded / f"read_back{saved}{shown}"
    run_checked("report", f"replayed{saved}", "-o", converted, cwd=recorded)
    read = READERS[shown]
    assert read(converted) == read(recorded / f"replayed{shown}")


def test_samples_in_an_unnamed_function_share_one_name_in_a_saved_profile(recorded):
    words = ["--module", "nameless", "live.otlp", "-f", "folded", "-o", "-"]
    leaves = {
        line.rpartition(" ")[0].rpartition(";")[2]
        for line in run_checked("report", *words, cwd=recorded).stdout.splitlines()
        if line.startswith("on_cpu")
    }
    assert len({leaf for leaf in leaves if leaf.startswith("fun_")}) == 1, leaves
