"""Scenarios in which other users' processes and threads keep the kernel and the agent busy."""

from __future__ import annotations

import sys
import time

from tests.faults.table.scenario import Scenario, beside, wait

KIND = "processes and threads"

FORKS = """
#include <sys/wait.h>
#include <unistd.h>
int main(void) { for (;;) { pid_t child = %s(); if (!child) %s; waitpid(child, 0, 0); } }
"""
EXIT, EXEC = "_exit(0)", '{ execl("/bin/true", "true", (char *)0); _exit(1); }'

THREADS = """
#include <pthread.h>
static void *run(void *nothing) { return nothing; }
int main(void)
{
    for (;;) { pthread_t thread; if (!pthread_create(&thread, 0, run, 0)) pthread_join(thread, 0); }
}
"""

RENAMES = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
int main(int argc, char **argv)
{
    long each = atol(argv[1]);
    struct timespec before, now;
    for (unsigned long number = 0;; number++) {
        char name[16];
        snprintf(name, sizeof name, "%s%lu", argc > 2 ? argv[2] : "", number);
        prctl(PR_SET_NAME, name);
        clock_gettime(CLOCK_MONOTONIC, &before);
        do clock_gettime(CLOCK_MONOTONIC, &now);
        while ((now.tv_sec - before.tv_sec) * 1000000000L + now.tv_nsec - before.tv_nsec < each);
    }
}
"""


def c(source, *words, count=1):
    return beside(lambda run: [run.c(source, *words) for _ in range(count)])


def python(code, *words):
    return beside(lambda run: run.python(code, *words))


def zombies(run):
    run.python(
        "import os, time\n"
        "for _ in range(5000):\n"
        "    if not os.fork():\n"
        "        os._exit(0)\n"
        "time.sleep(60)"
    )
    time.sleep(run.seconds + 2)


DEEP = """
import os
for _ in range(500):
    if os.fork():
        os.wait()
        os._exit(0)
while True:
    pass
"""
MANY_THREADS = """
import threading, time
threading.stack_size(65536)
for _ in range(4000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
while True:
    pass
"""
# Each child process has a different name and uses CPU time briefly.
WORKS = """
#define _GNU_SOURCE
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static void work(const char *format, unsigned long number, long nanoseconds)
{
    char name[16];
    struct timespec now;
    snprintf(name, sizeof name, format, number);
    prctl(PR_SET_NAME, name);
    do clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    while (now.tv_nsec < nanoseconds);
    _exit(0);
}
"""
NAMED = (
    WORKS
    + """
int main(void)
{
    for (unsigned long number = 0;; number++) {
        pid_t child = fork();
        if (!child)
            work("%lx", number, 20000000);
        waitpid(child, 0, 0);
    }
}
"""
)
# Uses clone3(2) with set_tid, so that each process has the id of the previous process.
SAME_ID = (
    WORKS
    + """
int main(void)
{
    int pid = getpid() + 1000;
    for (unsigned long number = 0;; number++) {
        struct clone_args how = {
            .exit_signal = SIGCHLD, .set_tid = (unsigned long)&pid, .set_tid_size = 1};
        int child = syscall(SYS_clone3, &how, sizeof how);
        if (child < 0) { pid++; continue; }
        if (!child)
            work("reused-%lu", number, 5000000);
        waitpid(child, 0, 0);
    }
}
"""
)
LABELS = """
from opentelemetry.sdk.trace import TracerProvider
from otel_kprofiler import labels, thread_context
thread_context.start({"service.name": "labels"})
tracer = TracerProvider().get_tracer("labels")
number = 0
while True:
    number += 1
    with tracer.start_as_current_span("GET"), labels({f"key-{number % 1000}": str(number) * 10}):
        sum(range(5000))
"""


def reused(run):
    """Runs processes that reuse a pid. Runs them as root, because only root may choose a pid."""
    run.c(SAME_ID, root=True)
    wait(run)


def labelled(run):
    for _ in range(2):
        run.start(sys.executable, "-c", LABELS)
    wait(run)


def one(name, fault, **more):
    return Scenario(KIND, name, fault, alone=True, **more)


SCENARIOS = [
    one("two processes that fork as fast as possible", c(FORKS % ("fork", EXIT), count=2)),
    one(
        "two processes that vfork and exec as fast as possible",
        c(FORKS % ("vfork", EXEC), count=2),
    ),
    one("two processes that create threads as fast as possible", c(THREADS, count=2)),
    one("a thread renames itself 2,000 times a second", c(RENAMES, 500_000)),
    one("a thread renames itself as fast as possible", c(RENAMES, 0)),
    one("thread names with terminal escape sequences", c(RENAMES, 500_000, "\x1b]0;x\x07")),
    one(
        "thread names that are not UTF-8",
        c(RENAMES, 500_000, b"\xff\xfe".decode(errors="surrogateescape")),
    ),
    one(
        "two processes that start children with different names as fast as possible",
        c(NAMED, count=2),
    ),
    one("each process has the previous process's id, but another name", reused),
    one("services publish labels with constantly changing names", labelled),
    one("5,000 zombies", zombies),
    one("500 processes, each the parent of the next", python(DEEP)),
    one("4,000 threads that sleep", python(MANY_THREADS)),
]
