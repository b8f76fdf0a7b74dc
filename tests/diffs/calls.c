/*
 * Spends a given fraction of CPU time in each of five system calls. Usage: calls SECONDS SHARE...
 *
 * In turns of 0.1 to 4 ms of CPU time, each thread repeats the call that is furthest below its
 * target fraction, so the samples from a call come in bursts. The threads start when standard input
 * is closed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { CALLS = 5, BYTES = 1 << 16, POLLED = 500, STEPS = 100, REPEATED = 10 };

static double seconds, shares[CALLS];
static int zero;
static char path[STEPS * sizeof("/proc/..") + 1];

static double cpu_time(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void make(int call, char *buffer, int file, struct pollfd *polled)
{
	struct stat found;

	switch (call) {
	case 0:
		if (read(zero, buffer, BYTES) != BYTES)
			abort();
		break;
	case 1:
		if (pwrite(file, buffer, BYTES, 0) != BYTES)
			abort();
		break;
	case 2:
		if (getrandom(buffer, BYTES / 16, 0) != BYTES / 16)
			abort();
		break;
	case 3:
		if (stat(path, &found))
			abort();
		break;
	case 4:
		if (poll(polled, POLLED, 0))
			abort();
		break;
	}
}

static void *work(void *argument)
{
	struct drand48_data random;
	struct pollfd polled[POLLED];
	double used[CALLS] = {}, sum = 0, now = cpu_time();
	char *buffer = calloc(1, BYTES);
	int ends[2], file = memfd_create("calls", 0); /* per thread, to avoid lock contention */

	srand48_r(time(NULL) + (long)argument + getpid(), &random);
	if (file < 0 || pipe(ends))
		abort();
	for (int at = 0; at < POLLED; at++)
		polled[at] = (struct pollfd){ends[0], POLLIN, 0};
	while (sum < seconds) {
		double start = now, length;
		int call = 0;

		for (int at = 1; at < CALLS; at++)
			if (sum * shares[at] - used[at] > sum * shares[call] - used[call])
				call = at;
		drand48_r(&random, &length);
		while (now - start < 1e-4 + length * 3.9e-3) {
			for (int at = 0; at < REPEATED; at++) /* repeat, because cpu_time() also makes a system call */
				make(call, buffer, file, polled);
			now = cpu_time();
		}
		used[call] += now - start;
		sum += now - start;
	}
	return NULL;
}

int main(int count, char **words)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	pthread_t threads[cpus];
	char end;

	if (count != 2 + CALLS)
		return 2;
	seconds = atof(words[1]) / cpus;
	for (int at = 0; at < CALLS; at++)
		shares[at] = atof(words[2 + at]) / 100;
	for (int at = 0; at < STEPS; at++)
		strcat(path, "/proc/..");
	zero = open("/dev/zero", O_RDONLY);
	while (read(0, &end, 1) > 0)
		;
	for (long at = 0; at < cpus; at++)
		if (pthread_create(&threads[at], NULL, work, (void *)at))
			abort();
	for (long at = 0; at < cpus; at++)
		pthread_join(threads[at], NULL);
	return 0;
}
