"""If a pid is reused immediately, samples are never attributed to the previous process."""

import os
from collections import Counter
from pathlib import Path

import pytest
from unwind_maps import compile_c

from tests.commands import run_checked
from tests.windows import read_samples

pytestmark = pytest.mark.live

PID = int(Path("/proc/sys/kernel/pid_max").read_text()) - 1
ROUNDS = int(os.environ.get("KPROFILER_ROUNDS", "150"))
# Both programs have functions at the same addresses.
PROGRAM = """
#include <time.h>
static volatile unsigned long count;
__attribute__((noinline)) void work_of_NAME(double seconds) {
    struct timespec now;
    do {
        for (int i = 0; i < 20000; i++) count++;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    } while (now.tv_sec + now.tv_nsec / 1e9 < seconds);
}
int main(void) { work_of_NAME(0.02); return 0; }
"""
# Uses clone3(2) with set_tid, so that each process has the id of the previous process.
DRIVER = """
#define _GNU_SOURCE
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int count, char **words) {
    int rounds = atoi(words[1]), pid = atoi(words[2]);
    for (int round = 0; round < rounds; round++) {
        struct clone_args how = {
            .exit_signal = SIGCHLD, .set_tid = (unsigned long)&pid, .set_tid_size = 1};
        char *program = words[3 + round % 2];
        int child = syscall(SYS_clone3, &how, sizeof how);
        if (child < 0) { perror("clone3"); return 1; }
        if (!child) { execl(program, program, NULL); _exit(127); }
        int status;
        if (waitpid(child, &status, 0) != pid || status) { return 2; }
    }
    return 0;
}
"""


@pytest.fixture
def programs(tmp_path):
    sources = {name: PROGRAM.replace("NAME", name) for name in ("first", "other")}
    options = ["-O1", "-static", "-no-pie", "-Wl,--build-id=uuid"]
    return [
        compile_c(tmp_path / name, source, *options)
        for name, source in {**sources, "driver": DRIVER}.items()
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="clone3 with set_tid needs root")
@pytest.mark.long
def test_samples_of_a_reused_pid_never_carry_names_from_the_previous_process(programs, tmp_path):
    first, other, driver = programs
    path = tmp_path / "x.otlp"
    command = ["--", driver, ROUNDS, PID, first, other]
    run_checked("record", "-F", 999, "-o", path, *command, timeout=600)
    results = Counter()
    for resource, sample in read_samples(path):
        attributes = resource.attributes
        if attributes["process.pid"] == PID and sample.thread_name in ("first", "other"):
            works = {
                frame.function.removeprefix("work_of_")
                for side in sample.stack.sides
                for frame in side.frames
                if frame.function.startswith("work_of_")
            }
            names = works | {sample.thread_name, attributes.get("process.executable.name")}
            results["mixed" if len(names) > 1 else "named" if works else "bare"] += len(
                sample.timestamps_unix_ns
            )
    assert results["mixed"] == 0, results
    assert results["named"] > ROUNDS, results
