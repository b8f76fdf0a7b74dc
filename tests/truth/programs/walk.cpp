// Chains of calls that are hard to unwind without frame pointers, forever.
// argv: "signals" (a timer interrupts all functions), "threads" (a second thread does the same),
// "rules" (only rules.S).
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#define CALLED extern "C" __attribute__((noinline))
#define NO_TAIL_CALL asm volatile("" ::: "memory")

extern "C" void all_rules(void); // rules.S
extern "C" const char copied[], copied_end[];

volatile unsigned long sink;
static bool only_rules;

CALLED void spin(long n)
{
	unsigned long x = n;

	for (long i = 0; i < 20000; i++)
		sink = x = x * 6364136223846793005UL + 1442695040888963407UL;
}

CALLED void large_frame(long n)
{
	char buffer[9000];

	memset(buffer, (int)n, sizeof buffer);
	sink = buffer[n & 4095];
	spin(n);
	asm volatile("" ::"r"(buffer) : "memory");
}

CALLED void variable_frame(long n)
{
	char *bytes = (char *)__builtin_alloca(64 + (n & 63) * 16);

	memset(bytes, 1, 64);
	asm volatile("" ::"r"(bytes) : "memory");
	large_frame(n);
	asm volatile("" ::"r"(bytes) : "memory");
}

// The CFA is read from memory.
CALLED __attribute__((target("avx2"))) void realigned_frame(long n)
{
	alignas(64) unsigned long words[16];

	for (int i = 0; i < 16; i++)
		words[i] = n + i;
	asm volatile("" ::"r"(words) : "memory");
	variable_frame(n);
	asm volatile("" ::"r"(words) : "memory");
}

CALLED void many_arguments(long a, long b, long c, long d, long e, long f, long g, long h)
{
	realigned_frame(a + b);
	sink = a * b + c * d;
	spin(e + f * g + h);
	NO_TAIL_CALL;
}

CALLED void recurse(int depth, long n)
{
	if (depth)
		recurse(depth - 1, n + 1);
	else
		many_arguments(n, 2, 3, 4, 5, 6, 7, 8);
	NO_TAIL_CALL;
}

static int compare(const void *a, const void *b)
{
	long x = *(long *)a, y = *(long *)b;

	spin(x);
	return x < y ? -1 : x > y;
}

CALLED void call_back(long n)
{
	long values[16];

	for (int i = 0; i < 16; i++)
		values[i] = (n * 7919 + i * 104729) % 1000;
	qsort(values, 16, sizeof *values, compare);
	sink = values[3];
}

CALLED void throws(long n)
{
	if (n & 1)
		throw std::string("odd");
	recurse(3, n);
	NO_TAIL_CALL;
}

CALLED void catches(long n)
{
	try {
		throws(n);
	} catch (std::string &text) {
		sink = text.size();
		spin(n);
	}
	NO_TAIL_CALL;
}

CALLED void templates(long n)
{
	std::function<void(long)> add = [n](long m) {
		spin(n + m);
		NO_TAIL_CALL;
	};
	std::vector<long> values(64, n);

	std::for_each(values.begin(), values.begin() + 2, add);
	NO_TAIL_CALL;
}

CALLED void formats(long n)
{
	char text[200];

	for (int i = 0; i < 100; i++)
		snprintf(text, sizeof text, "%ld %s %f %lx", n, "text", n * 0.1, n + i);
	sink = text[3];
}

// The vDSO, and functions called through the PLT.
CALLED void asks_the_time(void)
{
	struct timespec now;

	for (int i = 0; i < 300; i++)
		clock_gettime(CLOCK_MONOTONIC, &now);
	sink = now.tv_nsec;
}

CALLED void calls_the_system(void)
{
	static char buffer[4096];
	struct stat status;

	for (int i = 0; i < 20; i++) {
		if (getrandom(buffer, sizeof buffer, 0) < 0 || stat("/usr/lib", &status))
			abort();
	}
	sink = buffer[0];
}

static void (*without_tables)(void);

static void copy_code(void)
{
	void *memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		abort();
	memcpy(memory, copied, copied_end - copied);
	without_tables = (void (*)(void))memory;
}

CALLED void walk(long n)
{
	switch (only_rules ? 9 : n % 10) {
	case 0: recurse(12, n); break;
	case 1: call_back(n); break;
	case 2: catches(n); break;
	case 3: templates(n); break;
	case 4: formats(n); break;
	case 5: catches(n | 1); break;
	case 6: asks_the_time(); break;
	case 7: calls_the_system(); break;
	default:
		all_rules();
		if (only_rules)
			without_tables();
	}
	NO_TAIL_CALL;
}

static void handle(int)
{
	for (int i = 0; i < 30; i++)
		spin(i);
	NO_TAIL_CALL;
}

static void *work(void *)
{
	for (long n = 0;; n++) {
		walk(n);
		NO_TAIL_CALL;
	}
	return nullptr;
}

int main(int count, char **words)
{
	copy_code();
	for (int i = 1; i < count; i++) {
		if (!strcmp(words[i], "signals")) {
			struct sigaction action = {};
			struct itimerval often = {{0, 5000}, {0, 5000}};

			action.sa_handler = handle;
			sigaction(SIGALRM, &action, nullptr);
			setitimer(ITIMER_REAL, &often, nullptr);
		} else if (!strcmp(words[i], "rules")) {
			only_rules = true;
		} else {
			pthread_t thread;

			pthread_create(&thread, nullptr, work, nullptr);
		}
	}
	work(nullptr);
}
