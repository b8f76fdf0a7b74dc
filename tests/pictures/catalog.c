/* Sorts catalogs in three threads that share a lock, and writes them to disk. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { ITEMS = 100000, THREADS = 3 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t hash(uint64_t item)
{
	for (int round = 0; round < 8; round++)
		item = (item ^ item >> 29) * 0xbf58476d1ce4e5b9;
	return item;
}

static int compare(const void *left, const void *right)
{
	uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
	return (a > b) - (a < b);
}

static void publish(int file, uint64_t *items)
{
	pthread_mutex_lock(&lock);
	qsort(items, ITEMS, sizeof *items, compare);
	if (pwrite(file, items, ITEMS * sizeof *items, 0) < 0 || fdatasync(file))
		abort();
	pthread_mutex_unlock(&lock);
}

static void *build(void *file)
{
	uint64_t *items = malloc(ITEMS * sizeof *items);
	for (uint64_t seed = 0;; seed++) {
		for (int i = 0; i < ITEMS; i++)
			items[i] = hash(seed + i);
		publish(*(int *)file, items);
		usleep(50000);
	}
	return NULL;
}

int main(void)
{
	char path[] = "/var/tmp/catalog-XXXXXX";
	int file = mkstemp(path);
	unlink(path);
	pthread_t thread;
	for (int i = 1; i < THREADS; i++)
		pthread_create(&thread, NULL, build, &file);
	build(&file);
}
