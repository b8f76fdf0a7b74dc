/* Programs and libraries that differ only in the name of one function, work_N. The thread's name
 * contains N exactly while the function runs.
 *
 *   -DVARIANT=7 -shared   library: work_7
 *   -DVARIANT=7           program that runs work_7
 *   without               program that runs one library after the other
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define JOIN(a, b) a##b
#define NAME(prefix, number) JOIN(prefix, number)

static void name_thread(const char *prefix, int number)
{
	char name[16];
	snprintf(name, sizeof(name), "%s%d", prefix, number);
	prctl(PR_SET_NAME, name);
}

#ifdef VARIANT
volatile unsigned long steps;
__attribute__((noinline)) void NAME(work_, VARIANT)(unsigned long times)
{
	for (unsigned long i = 0; i < times; i++)
		steps++;
}

int variant(void)
{
	return VARIANT;
}

void enter(unsigned long times)
{
	NAME(work_, VARIANT)(times);
	steps++;
}

/* arguments: TIMES [LEFT DIRECTORY COUNT]; runs the loop, then executes the next of COUNT programs in DIRECTORY, LEFT times in all */
int main(int argc, char **argv)
{
	char path[4096], left[16];
	name_thread("v", VARIANT);
	enter(argc > 1 ? strtoul(argv[1], 0, 10) : 1000000);
	name_thread("idle", 0);
	if (argc < 5 || !atoi(argv[2]))
		return 0;
	snprintf(path, sizeof(path), "%s/p%d", argv[3], (VARIANT + 1) % atoi(argv[4]));
	snprintf(left, sizeof(left), "%d", atoi(argv[2]) - 1);
	execl(path, path, argv[1], left, argv[3], argv[4], (char *)0);
	return 6;
}
#else
static void copy(const char *from, const char *to)
{
	char bytes[65536];
	int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0755);
	ssize_t size;
	if (in < 0 || out < 0)
		exit(2);
	while ((size = read(in, bytes, sizeof(bytes))) > 0)
		if (write(out, bytes, size) != size)
			exit(3);
	close(in);
	close(out);
}

/* variants DIRECTORY HOW COUNT TIMES: HOW is own (separate paths), new (new files at one path),
 * same (one file, overwritten), gone (deleted after loading) */
int main(int argc, char **argv)
{
	const char *directory = argv[1], *how = argv[2];
	int count = atoi(argv[3]);
	unsigned long times = strtoul(argv[4], 0, 10);
	char from[4096], used[4096], fresh[4096];
	snprintf(used, sizeof(used), "%s/%s-%d.so", directory, how, getpid());
	snprintf(fresh, sizeof(fresh), "%s/fresh-%d.so", directory, getpid());
	for (int at = 0;; at = (at + 1) % count) {
		snprintf(from, sizeof(from), "%s/lib%d.so", directory, at);
		if (!strcmp(how, "own")) {
			strcpy(used, from);
		} else if (!strcmp(how, "same")) {
			copy(from, used);
		} else {
			copy(from, fresh);
			if (rename(fresh, used))
				exit(4);
		}
		void *library = dlopen(used, RTLD_NOW | RTLD_LOCAL);
		if (!library)
			exit(5);
		if (!strcmp(how, "gone"))
			unlink(used);
		void (*enter)(unsigned long) = (void (*)(unsigned long))dlsym(library, "enter");
		int (*variant)(void) = (int (*)(void))dlsym(library, "variant");
		name_thread("v", variant());
		enter(times);
		name_thread("idle", 0);
		dlclose(library);
	}
}
#endif
