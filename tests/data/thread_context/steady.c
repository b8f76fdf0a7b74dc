/* A thread that works in one context until it is killed: steady PAYLOAD [LIBRARY...]. */
#define _GNU_SOURCE
#include "publish.h"
#include <dlfcn.h>

#ifndef LATE_MS
void attach(void *record);
#endif

static struct record record = {
	.trace = {7}, .span = {7}, .valid = 1, .flags = 1, .bytes = 40, .attributes = {0, 16, [18] = 1, 20}};

int main(int count, char **words)
{
	publish(words[1]);
#ifdef LATE_MS
	void *library = 0;

	for (int i = 2; i < count; i++)
		library = dlopen(words[i], RTLD_NOW);
	void (*attach)(void *) =
		library ? (void (*)(void *))dlsym(library, "attach") : 0;

	if (!attach)
		return 2;
#endif
	(void)count;
	attach(&record);
	puts("ready");
	fflush(stdout);
	for (volatile uint64_t turns = 0;; turns++)
		;
}
