/* A well-behaved program: alternates work and sleep, and prints its CPU time in nanoseconds.

   With a real-time priority, the program runs as soon as it is runnable, regardless of other load.
   Periods of work have random lengths, so that they end at random times between ticks. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile sig_atomic_t ended;
static volatile unsigned long work;

static void end(int number)
{
    (void)number;
    ended = 1;
}

static long now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

__attribute__((noinline)) static void answer_requests(long until)
{
    do
        for (int round = 0; round < 20000; round++)
            work += round;
    while (!ended && now(CLOCK_MONOTONIC) < until);
}

int main(void)
{
    struct sched_param priority = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) {
        perror("a real-time priority (in a cgroup, set cpu.rt_runtime_us)");
        return 1;
    }
    signal(SIGTERM, end);
    while (!ended) {
        answer_requests(now(CLOCK_MONOTONIC) + 60000000 + random() % 60000000);
        struct timespec rest = {.tv_nsec = 60000000 + random() % 60000000};
        nanosleep(&rest, NULL);
    }
    printf("%ld\n", now(CLOCK_PROCESS_CPUTIME_ID));
    return 0;
}
