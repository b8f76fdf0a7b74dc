// SPDX-License-Identifier: GPL-2.0
/*
 * Spins in a known chain of functions, so that its profile can be checked exactly:
 *
 *   kprof_leaf < kprof_mid < kprof_thread < kthread < ret_from_fork
 *
 * and, for init_ms, in init code:
 *
 *   kprof_init_leaf < kprof_init_mid < kprof_spin_init < do_one_initcall
 *
 * Built with KPROF_OTHER=1, it is the same module with different function names.
 */
#include <linux/jiffies.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/sched.h>

#if KPROF_OTHER
#define kprof_leaf kprof_other_leaf
#define kprof_mid kprof_other_mid
#define kprof_thread kprof_other_thread
#endif

static int cpu = -1;
module_param(cpu, int, 0444);
MODULE_PARM_DESC(cpu, "CPU to spin on, -1 for any");

static unsigned int init_ms;
module_param(init_ms, uint, 0644);
MODULE_PARM_DESC(init_ms, "milliseconds to spin in init code; write 0 to end that at once");

static bool fail_init;
module_param(fail_init, bool, 0444);
MODULE_PARM_DESC(fail_init, "let init return -ENODEV");

static struct task_struct *thread;

#if KPROF_OTHER
/* Shifts the functions that follow, so that symbols of the first build would yield wrong names. */
noinline void kprof_shift(volatile unsigned int *counter)
{
	*counter += 1; *counter += 2; *counter += 3; *counter += 4;
	*counter += 5; *counter += 6; *counter += 7; *counter += 8;
}
EXPORT_SYMBOL_GPL(kprof_shift);
#endif

/* Calls nothing, so that every sample in the loop has this function as its leaf. */
static noinline __noclone void kprof_leaf(unsigned int rounds)
{
	while (rounds--)
		barrier();
}

/* Placed in a separate section, whose offset from .text in memory differs from its offset in the file. */
static noinline void __section(".kprof.text") kprof_mid(u64 end_ns)
{
	while (ktime_get_ns() < end_ns) {
		kprof_leaf(20000);
		barrier();
	}
}

/* Spins a quarter of the time, so that a guest with one CPU remains responsive. */
static noinline int kprof_thread(void *unused)
{
	while (!kthread_should_stop()) {
		kprof_mid(ktime_get_ns() + 4 * NSEC_PER_MSEC);
		schedule_timeout_interruptible(msecs_to_jiffies(12));
	}
	return 0;
}

static noinline __noclone void __init kprof_init_leaf(unsigned int rounds)
{
	while (rounds--)
		barrier();
}

static noinline void __init kprof_init_mid(u64 start_ns)
{
	while (ktime_get_ns() < start_ns + (u64)READ_ONCE(init_ms) * NSEC_PER_MSEC) {
		kprof_init_leaf(20000);
		cond_resched();
	}
}

static int __init kprof_spin_init(void)
{
	kprof_init_mid(ktime_get_ns());
	if (fail_init)
		return -ENODEV;
	thread = kthread_create(kprof_thread, NULL, "kprof_spin");
	if (IS_ERR(thread))
		return PTR_ERR(thread);
	if (cpu >= 0)
		kthread_bind(thread, cpu);
	wake_up_process(thread);
	return 0;
}

static void __exit kprof_spin_exit(void)
{
	kthread_stop(thread);
}

module_init(kprof_spin_init);
module_exit(kprof_spin_exit);
MODULE_DESCRIPTION("Known chain of functions for the tests of otel-kprofiler");
MODULE_LICENSE("GPL");
