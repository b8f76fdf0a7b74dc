"""A recording weighted by latency agrees with the known parallelism of its program."""

import json
import math
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
#include <pthread.h>
#include <stdio.h>
#include <time.h>
static double clock_s(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
static void spin(void) {
    volatile unsigned sum = 0;
    for (unsigned i = 0; i < 100000; i++) sum += i;
}
__attribute__((noinline)) void serial(void) {
    double end = clock_s(CLOCK_THREAD_CPUTIME_ID) + 1;
    while (clock_s(CLOCK_THREAD_CPUTIME_ID) < end) spin();
}
__attribute__((noinline)) void *parallel(void *unused) {
    double end = clock_s(CLOCK_THREAD_CPUTIME_ID) + 1;
    while (clock_s(CLOCK_THREAD_CPUTIME_ID) < end) spin();
    return unused;
}
int main(void) {
    pthread_t threads[2];
    serial();
    double start = clock_s(CLOCK_MONOTONIC);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], 0, parallel, 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    printf("%f\\n", clock_s(CLOCK_MONOTONIC) - start);
    return 0;
}
"""
COMMAND = [sys.executable, "-m", "otel_kprofiler"]
RATE = 499
SERIAL_S, PARALLEL_S = 1, 2
EDGE_S = 0.02


def totals(directory, *words):
    command = [*COMMAND, "report", "--json", *words, "x.otlp"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    (kind,) = json.loads(done.stdout)["kinds"]
    return {group["name"]: group["total"] / 1e9 for group in kind["groups"]}


def test_latency_weight_divides_parallel_time_but_not_serial_time(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "work.c").write_text(PROGRAM)
    subprocess.run(["gcc", "-O1", "-pthread", "-o", "work", "work.c"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [*COMMAND, "record", "-F", str(RATE), "-o", "x.otlp", "--", "./work"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    elapsed_s = float(done.stdout)

    time, latency = totals(tmp_path), totals(tmp_path, "--weight", "latency")
    for name, seconds in (("serial", SERIAL_S), ("parallel", PARALLEL_S)):
        # On a busy machine, the ticks hit a thread at random.
        assert time[name] == pytest.approx(seconds, abs=5 * math.sqrt(seconds / RATE))
    assert latency["serial"] == pytest.approx(time["serial"], abs=EDGE_S)
    # On a busy machine, the two threads are not always running at the same time.
    assert time["parallel"] / 2 - EDGE_S <= latency["parallel"] <= time["parallel"]
    assert latency["parallel"] <= elapsed_s + EDGE_S
