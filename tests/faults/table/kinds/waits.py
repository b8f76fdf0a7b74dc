"""Scenarios in which other users' threads wait and wake up while off-CPU sampling is enabled."""

from __future__ import annotations

from tests.faults.table.kinds.processes import c
from tests.faults.table.scenario import Scenario

KIND = "waits"

SLEEPERS = """
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
static long each;
static void *run(void *nothing) { for (;;) usleep(each); return nothing; }
int main(int argc, char **argv)
{
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 16384);
    each = atol(argv[2]);
    for (int i = 0; i < atoi(argv[1]); i++) { pthread_t one; pthread_create(&one, &small, run, 0); }
    pause();
}
"""
PIPES = """
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    for (int i = 0; i < atoi(argv[1]); i++) {
        int there[2], back[2];
        char byte = 0;
        pipe(there);
        pipe(back);
        if (!fork()) for (;;) { read(there[0], &byte, 1); write(back[1], &byte, 1); }
        if (!fork()) for (;;) { write(there[1], &byte, 1); read(back[0], &byte, 1); }
    }
    wait(0);
}
"""
YIELDS = """
#include <sched.h>
#include <unistd.h>
int main(void) { fork(); fork(); fork(); for (;;) sched_yield(); }
"""
HERD = """
#include <pthread.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all = PTHREAD_COND_INITIALIZER;
static void *run(void *nothing)
{
    pthread_mutex_lock(&lock);
    for (;;) pthread_cond_wait(&all, &lock);
    return nothing;
}
int main(void)
{
    for (int i = 0; i < 1000; i++) { pthread_t one; pthread_create(&one, 0, run, 0); }
    for (;;) { pthread_mutex_lock(&lock); pthread_cond_broadcast(&all); pthread_mutex_unlock(&lock);
               usleep(20000); }
}
"""
LOCKS = """
#include <pthread.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile long work;
static void *run(void *nothing)
{
    for (;;) { pthread_mutex_lock(&lock); for (int i = 0; i < 2000; i++) work++;
               pthread_mutex_unlock(&lock); }
    return nothing;
}
int main(void)
{
    for (int i = 0; i < 50; i++) { pthread_t one; pthread_create(&one, 0, run, 0); }
    pause();
}
"""
STOPS = """
#include <signal.h>
#include <unistd.h>
int main(void)
{
    pid_t child = fork();
    if (!child) for (;;);
    for (;;) { kill(child, SIGSTOP); usleep(500); kill(child, SIGCONT); usleep(500); }
}
"""
SYNCS = """
#include <fcntl.h>
#include <unistd.h>
int main(void)
{
    fork();
    int file = open("synced", O_CREAT | O_WRONLY, 0600);
    for (;;) { pwrite(file, "x", 1, 0); fsync(file); }
}
"""
VFORKS = """
#include <unistd.h>
#include <sys/wait.h>
int main(void) { for (;;) { if (!vfork()) { usleep(2000); _exit(0); } wait(0); } }
"""
STORMS = {
    "2,000 threads that repeatedly sleep for 100 ms": (SLEEPERS, 2000, 100_000),
    "10,000 threads that repeatedly sleep for a second": (SLEEPERS, 10_000, 1_000_000),
    "200 threads that repeatedly sleep for 50 µs": (SLEEPERS, 200, 50),
    "10,000 threads that sleep once for a long time": (SLEEPERS, 10_000, 100_000_000),
    "50 pairs of processes that pass a byte back and forth": (PIPES, 50),
    "8 processes that yield as fast as possible": (YIELDS,),
    "1,000 threads that are woken simultaneously, 50 times a second": (HERD,),
    "50 threads that contend for a lock": (LOCKS,),
    "a process that is stopped and continued 1,000 times a second": (STOPS,),
    "writes that are synced to disk": (SYNCS,),
    "parents that wait for vforked children": (VFORKS,),
}

SCENARIOS = [
    *[Scenario(KIND, name, c(*call), alone=True) for name, call in STORMS.items()],
    Scenario(KIND, "2,000 threads that repeatedly sleep for 100 ms, with wakers",
             c(SLEEPERS, 2000, 100_000), alone=True, sampler={"off_cpu": {"wakers": True}}),
    Scenario(KIND, "50 pairs of processes, with every wait sampled", c(PIPES, 50), alone=True,
             sampler={"off_cpu": {"samples_per_second_per_cpu": 10_000, "min_duration": "0s"}}),
]  # fmt: skip
