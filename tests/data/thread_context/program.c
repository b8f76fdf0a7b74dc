/*
 * Threads that change their contexts at random, and log the times, until the input ends:
 * program PAYLOAD LOG THREADS [LIBRARY...]. PAYLOAD is the process context's payload. Libraries are
 * opened after LATE_MS milliseconds without contexts; the last library has the variable.
 */
#define _GNU_SOURCE
#include "publish.h"
#include <dlfcn.h>
#include <pthread.h>

#define MOST 60000

struct line { /* when a context is not yet published, published, about to end, ended */
	uint64_t from, since, until, end, tid;
	uint8_t trace[16], span[8];
};

#ifdef LATE_MS
static void (*attach)(void *);
#else
void attach(void *record);
#endif
static volatile int stop;
static FILE *out;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static uint64_t draw(uint64_t *x)
{
	*x ^= *x << 13;
	*x ^= *x >> 7;
	*x ^= *x << 17;
	return *x;
}

static void work(uint64_t *random)
{
	uint64_t end = now() + draw(random) % 2000000, kind = draw(random) % 8;

	if (kind == 0)
		usleep(draw(random) % 3000);
	else
		while (now() < end)
			if (kind < 4)
				syscall(SYS_getppid);
}

static void fill(struct record *r, uint64_t *random, uint64_t thread)
{
	uint64_t ids[3] = {draw(random), thread, draw(random)};

	memcpy(r->trace, ids, 16);
	memcpy(r->span, ids + 2, 8);
	r->flags = ids[0] & 1;
	/* the span in hexadecimal; then an unknown key, and the first key again */
	r->attributes[0] = 0, r->attributes[1] = 1, r->attributes[2] = '-';
	r->attributes[3] = 200, r->attributes[4] = 1, r->attributes[5] = '?';
	r->attributes[6] = 0, r->attributes[7] = 16;
	for (int i = 0; i < 8; i++)
		sprintf((char *)r->attributes + 8 + 2 * i, "%02x", r->span[i]);
	r->bytes = 24;
}

static void *run(void *argument)
{
	uint64_t random = ((uint64_t)(uintptr_t)argument + 1) * 0x9e3779b97f4a7c15, count = 0;
	struct line *lines = calloc(MOST, sizeof(*lines));
	struct record records[2] = {};

	while (!stop && count < MOST) {
		struct line *line = lines + count;
		uint64_t kind = draw(&random) % 3;
		struct record *r = records + (kind & 1);

		if (kind == 2) {
			work(&random);
			continue;
		}
		if (kind == 1) { /* in place */
			attach(r);
			barrier();
		}
		fill(r, &random, (uintptr_t)argument);
		memcpy(line->trace, r->trace, sizeof(line->trace));
		memcpy(line->span, r->span, sizeof(line->span));
		line->from = now();
		barrier();
		r->valid = 1;
		barrier();
		if (kind == 0)
			attach(r);
		barrier();
		line->since = now();
		work(&random);
		line->until = now();
		barrier();
		if (kind == 0)
			attach(0);
		barrier();
		r->valid = 0;
		barrier();
		line->end = now();
		attach(0);
		line->tid = syscall(SYS_gettid);
		count++;
	}
	pthread_mutex_lock(&mutex);
	fwrite(lines, sizeof(*lines), count, out);
	pthread_mutex_unlock(&mutex);
	return 0;
}

int main(int count, char **words)
{
	pthread_t thread[256];
	int threads = atoi(words[3]);

	publish(words[1]);
	out = fopen(words[2], "w");
#ifdef LATE_MS
	for (uint64_t end = now() + LATE_MS * 1000000ull; now() < end;)
		syscall(SYS_getppid);
	void *library = 0;

	for (int i = 4; i < count; i++)
		library = dlopen(words[i], RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 2;
	}
	attach = (void (*)(void *))dlsym(library, "attach");
#endif
	(void)count;
	puts("ready");
	fflush(stdout);
	for (long i = 0; i < threads; i++)
		pthread_create(thread + i, 0, run, (void *)(i + 1));
	while (getchar() != EOF)
		;
	stop = 1;
	for (int i = 0; i < threads; i++)
		pthread_join(thread[i], 0);
	fclose(out);
	puts("done");
	return 0;
}
