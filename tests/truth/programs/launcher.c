/* launcher DIRECTORY COUNT TIMES PER_SECOND: starts the programs p0, p1, … in DIRECTORY one after
 * the other, at a steady rate, and writes the number of started programs to DIRECTORY/started. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_AT_ONCE 64

int main(int argc, char **argv)
{
	char path[4096], count[16];
	int programs = atoi(argv[2]), running = 0, status;
	long pause_ns = 1000000000L / atoi(argv[4]);
	snprintf(path, sizeof(path), "%s/started", argv[1]);
	int started = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	struct timespec next;
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (int at = 0;; at++) {
		snprintf(path, sizeof(path), "%s/p%d", argv[1], at % programs);
		if (!vfork()) {
			execl(path, path, argv[3], (char *)0);
			_exit(127);
		}
		if (pwrite(started, count, snprintf(count, sizeof(count), "%d", at + 1), 0) < 0)
			return 2;
		running++;
		while (waitpid(-1, &status, running < MOST_AT_ONCE ? WNOHANG : 0) > 0) {
			if (status)
				return 3;
			running--;
		}
		next.tv_nsec += pause_ns;
		next.tv_sec += next.tv_nsec / 1000000000L;
		next.tv_nsec %= 1000000000L;
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
	}
}
