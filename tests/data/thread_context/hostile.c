/*
 * A thread that publishes an invalid context, which must not be used: hostile PAYLOAD KIND. Works
 * until its input ends.
 */
#define _GNU_SOURCE
#include "publish.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>

void attach(void *record);

static struct record records[2];
static volatile int stop;

static void run_on(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void *change(void *unused) /* violates the protocol: runs in another thread */
{
	(void)unused;
	run_on(1);
	for (uint64_t i = 1; !stop; i++) {
		memcpy(records[0].trace, &i, 8);
		barrier();
	}
	return 0;
}

static void *wait_for_end(void *unused)
{
	(void)unused;
	while (getchar() != EOF)
		;
	stop = 1;
	return 0;
}

int main(int count, char **words)
{
	const char *kind = words[2];
	long page = sysconf(_SC_PAGESIZE);
	char *memory = mmap(0, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct record *last = (struct record *)(memory + page - 28);
	struct pollfd input = {0, POLLIN, 0};
	pthread_t thread, waiter;

	(void)count;
	mprotect(memory + page, page, PROT_NONE);
	publish(words[1]);
	memset(records[0].trace, 7, 16);
	memset(records[0].span, 7, 8);
	records[0].valid = 1;
	if (!strcmp(kind, "exec") && getenv("AGAIN") == 0) {
		setenv("AGAIN", "1", 1);
		attach(records);
		puts("ready");
		fflush(stdout);
		while (!poll(&input, 1, 0)) /* until the test writes a line */
			syscall(SYS_getppid);
		getchar();
		execv(words[0], words);
	}
	if (!strcmp(kind, "wild"))
		attach((void *)0x123456789abc);
	else if (!strcmp(kind, "kernel"))
		attach((void *)0xffffffff81000000);
	else if (!strcmp(kind, "itself"))
		memset(records, 0xff, sizeof(records)), attach(records);
	else if (!strcmp(kind, "invalid"))
		records[0].valid = 2, attach(records);
	else if (!strcmp(kind, "long"))
		records[0].bytes = 65535, attach(records);
	else if (!strcmp(kind, "end_of_memory")) {
		memcpy(last, records, 28);
		last->bytes = 600;
		attach(last);
	} else if (!strcmp(kind, "changing")) {
		attach(records);
		run_on(0);
		pthread_create(&thread, 0, change, 0);
	}
	puts("ready");
	fflush(stdout);
	pthread_create(&waiter, 0, wait_for_end, 0);
	while (!stop)
		syscall(SYS_getppid);
	return 0;
}
