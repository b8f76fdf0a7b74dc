/* Maps each file, writes an endless loop to the mapping, and runs the loop in a thread.

   The mappings are private, so that the files do not change. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
static const unsigned char loop[] = {0xeb, 0xfe};
#elif defined(__aarch64__)
static const unsigned char loop[] = {0x00, 0x00, 0x00, 0x14};
#endif

static void *run(void *code)
{
    ((void (*)(void))code)();
    return NULL;
}

int main(int argc, char **argv)
{
    for (int at = 1; at < argc; at++) {
        struct stat status;
        int file = open(argv[at], O_RDONLY);
        if (file < 0 || fstat(file, &status)) {
            perror(argv[at]);
            return 1;
        }
        size_t size = status.st_size < 8192 ? 8192 : status.st_size;
        unsigned char *code = mmap(NULL, size > 1 << 30 ? 1 << 30 : size,
                                   PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE, file, 0);
        if (code == MAP_FAILED) {
            perror("mmap");
            return 1;
        }
        size_t place = status.st_size > 4096 + 16 ? 4096 : 64;
        memcpy(code + place, loop, sizeof loop);
        pthread_t thread;
        pthread_create(&thread, NULL, run, code + place);
    }
    pause();
    return 0;
}
