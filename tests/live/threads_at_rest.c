/*
 * Starts threads that sleep in known functions. Prints a line for each thread: "TID CAUSE
 * FUNCTION...", leaf first. The main thread starts, stops and counts the threads.
 *
 * usage: threads_at_rest COPIES   (of each kind of thread)
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define REST(name, cause, chain, act) \
	__attribute__((noinline)) static void name##_leaf(void) \
	{ \
		act; \
		__asm__ volatile(""); \
	} \
	__attribute__((noinline)) static void name##_middle(void) \
	{ \
		name##_leaf(); \
		__asm__ volatile(""); \
	} \
	static void *name##_thread(void *unused) \
	{ \
		say(cause, #name "_leaf " #name "_middle " #name "_thread"); \
		name##_middle(); \
		return unused; \
	}

static int pipes[2];
static sem_t never, said;

static void say(const char *cause, const char *chain)
{
	char line[200];
	int length = snprintf(line, sizeof(line), "%ld %s %s\n", syscall(SYS_gettid), cause, chain);

	if (write(1, line, length) != length)
		abort();
	sem_post(&said);
}

static volatile char byte;

REST(sleeper, "sleep", , usleep(1000000000))
REST(reader, "pipe", , byte = read(pipes[0], (char *)&byte, 1))
REST(poller, "poll", , poll(0, 0, -1))
REST(locker, "futex", , sem_wait(&never))
REST(parent, "child", , if (!vfork()) { usleep(1000000000); _exit(0); })

static void start(void *(*run)(void *))
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 64 * 1024);
	if (pthread_create(&thread, &attributes, run, 0))
		abort();
	sem_wait(&said);
}

int main(int count, char **words)
{
	if (count != 2 || pipe(pipes) || sem_init(&never, 0, 0) || sem_init(&said, 0, 0))
		return 2;
	for (int i = atoi(words[1]); i > 0; i--) {
		start(sleeper_thread);
		start(reader_thread);
		start(poller_thread);
		start(locker_thread);
	}
	start(parent_thread);
	puts("ready");
	fflush(stdout);
	pause();
}
