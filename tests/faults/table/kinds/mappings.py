"""Faults in other users' processes: in their mappings, stacks and generated code."""

from __future__ import annotations

from tests.faults.table.kinds.processes import c
from tests.faults.table.programs import build
from tests.faults.table.scenario import Scenario, wait
from tests.fuse import Fuse

KIND = "mappings and stacks"

HEAD = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static volatile unsigned long work;
static void burn(void) { for (int i = 0; i < 100000; i++) work += i; }
"""
CHURN = """
int main(void)
{
    int file = open("/proc/self/exe", O_RDONLY);
    for (;;) {
        void *at = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
        munmap(at, 4096);
    }
}
"""
MANY = """
int main(void)
{
    int file = open("/proc/self/exe", O_RDONLY);
    for (int i = 0; i < 60000; i++)
        mmap(0, 4096, PROT_READ | (i & 1 ? PROT_EXEC : 0), MAP_PRIVATE, file, 0);
    for (;;) burn();
}
"""
PROTECT = """
int main(void)
{
    char *at = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (;;) { mprotect(at, 4096, 1); mprotect(at, 4096, 5); }
}
"""
JIT = """
int main(void)
{
    for (unsigned round = 0;; round++) {
        unsigned char *at = mmap(0, 65536, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(at, 0x90, 60000);
        at[60000] = 0xc3;
        for (int i = 0; i < 20; i++) ((void (*)(void))at)();
        munmap(at, 65536);
    }
}
"""
MEMFD = """
int main(void)
{
    for (;;) {
        int file = memfd_create("\\n\\033[2Jmemfd", 0);
        ftruncate(file, 8192);
        unsigned char *at = mmap(0, 8192, 7, MAP_PRIVATE, file, 0);
        memset(at, 0x90, 8000);
        at[8000] = 0xc3;
        for (int i = 0; i < 2000; i++) ((void (*)(void))at)();
        munmap(at, 8192);
        close(file);
    }
}
"""
HUGE = """
int main(void)
{
    for (int i = 0; i < 60; i++)
        mmap(0, 1UL << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (;;) burn();
}
"""
DEEP = """
static int __attribute__((noinline)) down(int n)
{
    int r = n ? down(n - 1) + 1 : (burn(), 0);
    work += r;
    return r;
}
int main(void) { for (;;) down(%d); }
"""
POINTER = """
int main(void)
{
    static char stack[65536];
    (void)stack;
    for (;;)
        __asm__ volatile("push %%rbp; mov %%rsp, %%rbx; mov %0, %%rsp; mov %1, %%rbp;"
                         "mov $3000000, %%rcx; 1: dec %%rcx; jnz 1b; mov %%rbx, %%rsp; pop %%rbp"
                         :: "r"((unsigned long)(VALUE)), "r"((unsigned long)(OTHER))
                         : "rbx", "rcx", "memory");
}
"""
LOOP = """
static void *frames[4];
int main(void)
{
    frames[0] = frames;
    frames[1] = (void *)main;
    for (;;)
        __asm__ volatile("push %%rbp; mov %0, %%rbp; mov $3000000, %%rcx; 1: dec %%rcx; jnz 1b;"
                         "pop %%rbp" :: "r"(frames) : "rcx", "memory");
}
"""
ALTERNATE = """
static char stack[65536];
static void handle(int number) { burn(); }
int main(void)
{
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK | SA_NODEFER};
    sigaltstack(&alternate, 0);
    sigaction(SIGUSR1, &action, 0);
    for (;;) raise(SIGUSR1);
}
"""
JUMPS = """
static jmp_buf buffer;
int main(void) { for (;;) if (!setjmp(buffer)) { work++; longjmp(buffer, 1); } }
"""
FAULTS = """
int main(void)
{
    for (;;) {
        char *at = mmap(0, 1 << 24, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (int i = 0; i < 1 << 24; i += 4096) at[i] = 1;
        munmap(at, 1 << 24);
    }
}
"""
STACKS = """
int main(void)
{
    for (;;) {
        volatile char *base = alloca(4096);
        for (long i = 0; i < 4096; i++) base[i] = random();
        burn();
    }
}
"""


def pointer(value, other="0"):
    return POINTER.replace("VALUE", value).replace("OTHER", other)


SCENARIOS = [
    Scenario(KIND, name, c(HEAD + source), alone=True)
    for name, source in {
        "code is mapped and unmapped as fast as possible": CHURN,
        "60,000 mappings of a file": MANY,
        "memory is made executable and non-executable as fast as possible": PROTECT,
        "code is generated in a new mapping every time": JIT,
        "code in memfds whose names contain control characters": MEMFD,
        "60 TiB of address space": HUGE,
        "stack of 50 frames": DEEP % 50,
        "stack of 50,000 frames": DEEP % 50_000,
        "stack pointer 0": pointer("0L"),
        "stack pointer set to a kernel address": pointer("0xffffffff81000000UL"),
        "stack pointer set to a non-canonical address": pointer("0x8000000000000000UL", "-1L"),
        "stack pointer set to an address in static data": pointer("stack + 4096", "stack + 1"),
        "frame pointer that points to itself": LOOP,
        "signal handlers on an alternate stack": ALTERNATE,
        "jumps between frames": JUMPS,
        "pages are faulted in as fast as possible": FAULTS,
        "stack of random bytes": STACKS,
    }.items()
]


def run_from_fuse(delay_s):
    """Runs a program from a file system that responds late, or not until it is unmounted.

    A killed process exits only after its threads have received the responses they are waiting for.
    """

    def fault(run):
        program = build(HEAD + "int main(void) { for (;;) burn(); }", "-g")
        fuse = Fuse(run.public / "slow", {"program": program.read_bytes()})
        run.on_close(fuse.close)
        run.start(run.public / "slow" / "program", root=True)
        fuse.freeze(delay_s=delay_s)
        wait(run)
        if not fuse.count_held():
            raise RuntimeError("the agent has not read from the file system")
        run.end_programs()
        fuse.close()

    return fault


SCENARIOS += [
    Scenario(KIND, f"program on a file system (FUSE) that {when}", run_from_fuse(delay_s))
    for when, delay_s in {"responds after 60 s": 60, "never responds": None}.items()
]
