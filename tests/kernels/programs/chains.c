// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Calls functions in an endless loop. Every function except the signal handler has one known caller. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define CALLED __attribute__((noinline, noclone, noipa))

volatile unsigned long sink;

CALLED void leaf(unsigned long n)
{
	for (int i = 0; i < 30000; i++)
		sink = n = n * 6364136223846793005UL + i;
}

CALLED void large_frame(unsigned long n)
{
	volatile char bytes[6000];

	bytes[n % 6000] = n;
	leaf(n);
	sink += bytes[64];
}

CALLED void variable_frame(unsigned long n)
{
	char *bytes = __builtin_alloca(64 + (n & 31) * 16);

	memset(bytes, n, 64);
	large_frame(n + bytes[5]);
	sink += bytes[7];
}

CALLED int compare(const void *a, const void *b)
{
	unsigned long x = *(const unsigned long *)a, y = *(const unsigned long *)b;

	for (int i = 0; i < 20; i++)
		sink += x ^ y;
	return (x > y) - (x < y);
}

CALLED void sorts(unsigned long n)
{
	unsigned long all[300];

	for (int i = 0; i < 300; i++)
		all[i] = n = n * 6364136223846793005UL + i;
	qsort(all, 300, sizeof(all[0]), compare);
	sink += all[17];
}

CALLED void reads_clock(void)
{
	struct timespec now;

	for (int i = 0; i < 2000; i++) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		sink += now.tv_nsec;
	}
}

CALLED void asks(void)
{
	for (int i = 0; i < 1000; i++)
		sink += syscall(SYS_getppid);
}

CALLED void waits(void)
{
	struct timespec short_time = {0, 3000000};

	nanosleep(&short_time, NULL);
	sink++;
}

CALLED void in_handler(unsigned long n)
{
	for (int i = 0; i < 30000; i++)
		sink = n = n * 6364136223846793005UL + i;
}

CALLED void handle(int number)
{
	in_handler(number);
	sink++;
}

CALLED void serve(void)
{
	for (unsigned long n = 1;; n++) {
		variable_frame(n);
		sorts(n);
		reads_clock();
		asks();
		waits();
	}
}

int main(void)
{
	struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
	struct itimerval every = {{0, 2000}, {0, 2000}};

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	serve();
	return sink;
}
