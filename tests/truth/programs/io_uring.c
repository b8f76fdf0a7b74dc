/* Reads /dev/zero by a thread that the kernel creates for this process; exits with 3 without io_uring. */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ENTRIES = 8, BYTES = 64 << 20 };

static char *map(int fd, long bytes, long offset)
{
	int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;

	return mmap(0, bytes, PROT_READ | PROT_WRITE, flags | MAP_POPULATE, fd, offset);
}

int main(void)
{
	struct io_uring_params p = { 0 };
	int fd = syscall(SYS_io_uring_setup, ENTRIES, &p);
	int zero = open("/dev/zero", O_RDONLY);

	if (fd < 0)
		return 3;
	char *submissions = map(fd, p.sq_off.array + p.sq_entries * 4, IORING_OFF_SQ_RING);
	char *completions = map(fd, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe),
				IORING_OFF_CQ_RING);
	struct io_uring_sqe *requests = (void *)map(
		fd, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
	char *buffer = map(-1, BYTES, 0);

	for (;;) {
		unsigned *tail = (unsigned *)(submissions + p.sq_off.tail), at = *tail % ENTRIES;

		requests[at] = (struct io_uring_sqe){ .opcode = IORING_OP_READ, .fd = zero,
						      .addr = (unsigned long)buffer, .len = BYTES,
						      .flags = IOSQE_ASYNC };
		((unsigned *)(submissions + p.sq_off.array))[at] = at;
		__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
		if (syscall(SYS_io_uring_enter, fd, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0)
			return 1;
		unsigned *head = (unsigned *)(completions + p.cq_off.head);
		__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	}
}
