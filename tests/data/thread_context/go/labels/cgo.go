//go:build withcgo

// Computes in C, on the stack of the thread's scheduler.
package main

/*
#include <time.h>

static void compute(long ns)
{
	struct timespec t;
	long end = 0, now;

	do {
		clock_gettime(CLOCK_MONOTONIC, &t);
		now = t.tv_sec * 1000000000 + t.tv_nsec;
		if (!end)
			end = now + ns;
	} while (now < end);
}
*/
import "C"
import "time"

func init() {
	compute = func(duration time.Duration) { C.compute(C.long(duration)) }
}
