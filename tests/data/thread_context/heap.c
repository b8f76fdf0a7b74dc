/*
 * Memory with the layout of V8's heap, in which Node.js publishes contexts: heap PAYLOAD KIND.
 * Works until its input ends. The storage's key is the last entry of its bucket.
 */
#define _GNU_SOURCE
#include "publish.h"
#include <pthread.h>

#define TAGGED(object) ((uint64_t)(object) + 1)
#define SMALL(number) ((uint64_t)(number) << 32)
#define WILD 0x123456789abdull

__thread struct {
	uint64_t *frame_at, *storage_at;
	uint32_t hash, reserved;
	uint64_t undefined;
} otel_thread_ctx_nodejs_v1;

static struct record record;
static volatile int stop;
static uint64_t frame_at, storage_at, undefined[4], storage[4], frame[4], object[5], table[256];

static void *wait_for_end(void *unused)
{
	(void)unused;
	while (getchar() != EOF)
		;
	stop = 1;
	return 0;
}

static void fill(const char *kind)
{
	int entries = !strcmp(kind, "far") ? 16 : !strcmp(kind, "too_far") ? 17 : 2;
	int buckets = !strcmp(kind, "odd") ? 3 : 2, hash = 0x51230;
	uint64_t *words = table + 2, *entry = words + 3 + buckets;

	words[2] = SMALL(buckets);
	words[3 + (hash & (buckets - 1))] = SMALL(entries - 1);
	for (int i = 0; i < entries; i++) {
		entry[3 * i] = i ? TAGGED(frame) : TAGGED(storage);
		entry[3 * i + 1] = i ? TAGGED(undefined) : TAGGED(object);
		entry[3 * i + 2] = SMALL(i - 1);
	}
	frame[3] = TAGGED(table);
	object[!strcmp(kind, "early") ? 3 : 4] = (uint64_t)&record;
	if (!strcmp(kind, "other"))
		entry[0] = TAGGED(object);
	else if (!strcmp(kind, "loop"))
		entry[0] = TAGGED(object), entry[2] = SMALL(entries - 1);
	else if (!strcmp(kind, "undefined"))
		entry[1] = TAGGED(undefined), undefined[3] = (uint64_t)&record;
	else if (!strcmp(kind, "number"))
		entry[1] = TAGGED(object) - 1 + 2;
	else if (!strcmp(kind, "field"))
		object[4] = TAGGED(&record);
	else if (!strcmp(kind, "wild_table"))
		frame[3] = WILD;
	else if (!strcmp(kind, "wild_value"))
		entry[1] = WILD;
	frame_at = TAGGED(frame);
	storage_at = TAGGED(storage);
	otel_thread_ctx_nodejs_v1.storage_at = &storage_at;
	otel_thread_ctx_nodejs_v1.hash = hash;
	otel_thread_ctx_nodejs_v1.undefined = TAGGED(undefined);
	if (strcmp(kind, "none"))
		otel_thread_ctx_nodejs_v1.frame_at = &frame_at;
}

int main(int count, char **words)
{
	pthread_t waiter;

	(void)count;
	publish(words[1]);
	memset(record.trace, 7, 16);
	memset(record.span, 7, 8);
	record.valid = 1;
	fill(words[2]);
	puts("ready");
	fflush(stdout);
	pthread_create(&waiter, 0, wait_for_end, 0);
	while (!stop)
		syscall(SYS_getppid);
	return 0;
}
