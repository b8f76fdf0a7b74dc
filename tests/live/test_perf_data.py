"""Reports on recordings made with perf show the same counts and names as ``perf script``."""

import json
import re
import shutil
import subprocess
from collections import Counter

import pytest
from unwind_maps import compile_c

from otel_kprofiler.symbols.kernel.names import strip_clone_suffix
from tests.commands import run_checked

PROGRAM = """
#include <fcntl.h>
#include <time.h>
#include <unistd.h>
static char bytes[1 << 20];
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
__attribute__((noinline)) unsigned inner(unsigned n) {
    volatile unsigned sum = 0;
    for (unsigned i = 0; i < n; i++) sum += i;
    return sum;
}
__attribute__((noinline)) unsigned outer(unsigned n) { return inner(n) + 1; }
int main(void) {
    int zero = open("/dev/zero", O_RDONLY);
    double end = now() + 0.8;
    unsigned sum = 0;
    while (now() < end) {
        sum += outer(100000);
        sum += read(zero, bytes, sizeof bytes);
    }
    return sum == 1;
}
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if shutil.which("perf") is None:
        pytest.skip("needs perf")
    directory = tmp_path_factory.mktemp("perf")
    words = ["-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-Wl,--build-id=sha1"]
    compile_c(directory / "work", PROGRAM, *words)
    run(directory, "perf", "record", "-q", "-N", "-e", "cpu-clock", "-F", "499", "-g",
        "-o", "perf.data", "./work")  # fmt: skip
    return directory


def run(directory, *words):
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(directory, *words):
    return run_checked("report", *words, "perf.data", cwd=directory).stdout


def test_functions_have_the_counts_and_names_that_perf_reports(recorded):
    theirs, totals = Counter(), Counter()
    for block in run(recorded, "perf", "script", "-F", "ip,sym", "-i", "perf.data").split("\n\n"):
        names = [
            strip_clone_suffix(name.removeprefix("__pfx_"))
            for name in re.findall(r"^\s+[0-9a-f]+ (\S+)", block, re.MULTILINE)
        ]
        if names:
            theirs[names[0]] += 1
            totals.update(set(names))
    (kind,) = json.loads(report(recorded, "--json"))["kinds"]
    ours = {group["name"]: group for group in kind["groups"]}
    assert kind["kind"] == "on_cpu"
    assert kind["samples"] == theirs.total() > 100
    period = kind["total"] // kind["samples"]
    for name in ("inner", "outer", "main"):
        assert ours[name]["total"] == totals[name] * period
        assert ours[name]["self"] == theirs[name] * period
    agreed = sum(min(count, ours.get(name, {"self": 0})["self"] // period)
                 for name, count in theirs.items())  # fmt: skip
    assert agreed >= 0.98 * theirs.total(), "aliases of an address may differ"


def test_functions_have_names_if_only_mapping_records_have_build_ids(recorded):
    """``perf record --buildid-mmap`` writes no table of build ids."""
    run(recorded, "perf", "record", "-q", "-N", "-e", "cpu-clock", "-F", "499", "-g",
        "--buildid-mmap", "-o", "mapped.data", "./work")  # fmt: skip
    document = run_checked("report", "--json", "mapped.data", cwd=recorded).stdout
    (kind,) = json.loads(document)["kinds"]
    names = {group["name"]: group["place"] for group in kind["groups"]}
    assert (names["outer"], names["main"]) == ("work", "work")


def test_every_kind_of_report_can_be_generated_from_a_perf_recording(recorded):
    report(recorded, "-o", "flame.html")
    report(recorded, "-o", "converted.otlp")
    compared = run_checked("diff", "perf.data", "converted.otlp", "--json", cwd=recorded)
    assert "inner" in compared.stdout
    converted = run_checked("report", "--json", "converted.otlp", cwd=recorded).stdout
    ours = json.loads(report(recorded, "--json"))
    assert json.loads(converted)["kinds"][0]["groups"] == ours["kinds"][0]["groups"]
    assert "work" in report(recorded, "--by", "process")
