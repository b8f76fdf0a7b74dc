/* Runs an endless loop of deep calls, frames of all sizes, and signals. Does not use libc. */
typedef unsigned long word;

static long call(long number, long a, long b, long c, long d)
{
	register long x8 asm("x8") = number, x0 asm("x0") = a, x1 asm("x1") = b;
	register long x2 asm("x2") = c, x3 asm("x3") = d;

	asm volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
}

volatile word sink;
#define CALLED __attribute__((noinline))

CALLED void leaf(word n)
{
	for (word i = 0; i < 3000; i++)
		sink = n = n * 6364136223846793005UL + i;
}

CALLED void asks(word n)
{
	for (int i = 0; i < 20; i++)
		sink += call(173, n, 0, 0, 0); /* getppid */
}

CALLED void large_frame(word n)
{
	volatile char bytes[6000];

	for (int i = 0; i < 6000; i += 64)
		bytes[i] = n;
	leaf(n + bytes[64]);
	sink += bytes[128];
}

CALLED void variable_frame(word n)
{
	char *bytes = __builtin_alloca(64 + (n & 31) * 16);

	asm volatile("" ::"r"(bytes) : "memory");
	large_frame(n);
	asks(n);
	asm volatile("" ::"r"(bytes) : "memory");
}

CALLED void recurse(int depth, word n)
{
	if (depth)
		recurse(depth - 1, n + 1);
	else
		variable_frame(n);
	sink++;
}

CALLED void handle(int number)
{
	recurse(3, number);
}

CALLED void many(word a, word b, word c, word d, word e, word f)
{
	recurse(12, a);
	leaf(b + c);
	sink += a * b + c * d + e * f;
}

struct { void (*handler)(int); word flags, restorer, mask; } action = { handle, 0, 0, 0 };
struct { long interval_s, interval_us, s, us; } timer = { 0, 500, 0, 500 };

CALLED void run(void)
{
	call(134, 14, (long)&action, 0, 8);	/* rt_sigaction(SIGALRM) */
	call(103, 0, (long)&timer, 0, 0);	/* setitimer(ITIMER_REAL) */
	for (word n = 1;; n++)
		many(n, 2, 3, 4, 5, 6);
}

asm(".globl _start\n.type _start, %function\n_start:\n.cfi_startproc\n.cfi_undefined x30\n"
    "mov x29, #0\nbl run\nbrk #1\n.cfi_endproc\n");
