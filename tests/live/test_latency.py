"""A latency-weighted recording reflects the known parallelism of the recorded program."""

import json
import math

import pytest
from unwind_maps import compile_c

from tests.commands import run_checked

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
RATE = 499
SERIAL_S, PARALLEL_S = 1, 2
EDGE_S = 0.02


def totals(directory, *words):
    done = run_checked("report", "--json", *words, "x.otlp", cwd=directory)
    (kind,) = json.loads(done.stdout)["kinds"]
    return {group["name"]: group["total"] / 1e9 for group in kind["groups"]}


@pytest.mark.long
def test_latency_weight_divides_parallel_time_but_not_serial_time(tmp_path):
    program = compile_c(tmp_path / "work", PROGRAM, "-O1", "-pthread")
    done = run_checked("record", "-F", RATE, "-o", "x.otlp", "--", program, cwd=tmp_path)
    elapsed_s = float(done.stdout)

    time, latency = totals(tmp_path), totals(tmp_path, "--weight", "latency")
    for name, seconds in (("serial", SERIAL_S), ("parallel", PARALLEL_S)):
        # On a busy machine, timer ticks hit a thread at random times.
        assert time[name] == pytest.approx(seconds, abs=5 * math.sqrt(seconds / RATE))
    assert latency["serial"] == pytest.approx(time["serial"], abs=EDGE_S)
    # On a busy machine, the two threads are not always running at the same time.
    assert time["parallel"] / 2 - EDGE_S <= latency["parallel"] <= time["parallel"]
    assert latency["parallel"] <= elapsed_s + EDGE_S
