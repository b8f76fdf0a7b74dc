// Calls a C library that has no unwind tables: callbacks, strings, memory, numbers, system calls;
// also uses threads and signals if its argument is "all".
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline))

static int numbers[512];
static volatile unsigned long sink;

NOINLINE static int compare(const void *a, const void *b)
{
	char left[32], right[32];

	snprintf(left, sizeof(left), "%08d", *(const int *)a);
	snprintf(right, sizeof(right), "%08d", *(const int *)b);
	return strcmp(left, right);
}

NOINLINE static void sort(unsigned seed)
{
	for (int i = 0; i < 512; i++)
		numbers[i] = (seed = seed * 1103515245 + 12345) >> 8 & 0xffff;
	qsort(numbers, 512, sizeof(numbers[0]), compare);
	sink += numbers[256];
}

NOINLINE static void copy(unsigned seed)
{
	char *a = malloc(20000 + seed % 999), *b = malloc(20000);

	memset(a, 'x', 19999);
	a[19999] = 0;
	for (int i = 0; i < 50; i++) {
		memcpy(b, a, 20000);
		sink += strlen(b) + (strchr(b, 'y') != 0);
	}
	free(a);
	free(b);
}

NOINLINE static void print(unsigned seed)
{
	char text[400];

	for (int i = 0; i < 100; i++)
		sink += snprintf(text, sizeof(text), "%d %s %g %lx %10.3f", seed, "text", seed / 3.0,
				 (long)seed, seed * 1.5);
}

NOINLINE static void call_kernel(unsigned seed)
{
	for (int i = 0; i < 200; i++) {
		sink += getppid();
		sink += write(-1, &seed, 1);
	}
}

NOINLINE static void work(unsigned seed, int depth)
{
	if (depth) {
		work(seed + 1, depth - 1);
		sink++;
		return;
	}
	sort(seed);
	copy(seed);
	print(seed);
	call_kernel(seed);
}

NOINLINE static void on_signal(int number)
{
	char text[64];

	for (int i = 0; i < 300; i++)
		sink += snprintf(text, sizeof(text), "%d", number + i);
}

static void *run(void *seed)
{
	for (unsigned i = 0;; i++)
		work((unsigned long)seed + i, 3);
	return 0;
}

int main(int count, char **arguments)
{
	struct itimerval often = { { 0, 3000 }, { 0, 3000 } };
	pthread_t thread;

	if (count > 1) {
		signal(SIGALRM, on_signal);
		setitimer(ITIMER_REAL, &often, 0);
		pthread_create(&thread, 0, run, (void *)1000);
	}
	run((void *)(long)getpid());
}
