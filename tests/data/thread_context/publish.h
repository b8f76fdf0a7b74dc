/* Thread contexts (OTEP 4947), and a process context (OTEP 4719) with a payload from a file. */
#pragma once

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define barrier() __asm__ volatile("" ::: "memory")

struct record {
	uint8_t trace[16], span[8], valid, flags;
	uint16_t bytes;
	uint8_t attributes[64];
} __attribute__((packed, aligned(8)));

struct context_header {
	char signature[8];
	uint32_t version, bytes;
	volatile uint64_t published_at;
	void *payload;
};

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_BOOTTIME, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void publish(const char *path)
{
	int fd = memfd_create("OTEL_CTX", MFD_CLOEXEC | MFD_ALLOW_SEALING), file = open(path, O_RDONLY);
	struct context_header *header;
	char *payload = malloc(16384);
	ssize_t bytes = read(file, payload, 16384);

	if (fd < 0 || bytes <= 0 || ftruncate(fd, 4096))
		exit(3);
	header = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	memcpy(header->signature, "OTEL_CTX", 8);
	header->version = 2;
	header->bytes = bytes;
	header->payload = payload;
	barrier();
	header->published_at = now();
	close(fd);
	close(file);
}
