// Calls C forever, as Go programs do: calls, callbacks that grow the goroutine's stack, signals.
package main

/*
#include <stdlib.h>

extern int goCompare(void *, void *);

#define NOINLINE __attribute__((noinline))

NOINLINE static unsigned spin(unsigned n)
{
	volatile unsigned sum = n;

	for (int i = 0; i < 5000; i++)
		sum = sum * 31 + i;
	return sum;
}

NOINLINE static unsigned deep(unsigned n, int depth)
{
	return (depth ? deep(n, depth - 1) + 1 : spin(n)) ^ 1;
}

NOINLINE static int compare(const void *a, const void *b)
{
	return spin(1) ? goCompare((void *)a, (void *)b) : 0;
}

NOINLINE static int sort(int n)
{
	int numbers[32];

	for (int i = 0; i < 32; i++)
		numbers[i] = n = n * 1103515245 + 12345;
	qsort(numbers, 32, sizeof(int), compare);
	return numbers[3];
}
*/
import "C"
import "unsafe"

//go:noinline
func grow(n int) int {
	var buffer [300]byte
	if n == 0 {
		return len(buffer)
	}
	buffer[n%len(buffer)] = byte(n)
	return grow(n-1) + int(buffer[n%7])
}

//export goCompare
func goCompare(a, b unsafe.Pointer) C.int {
	grow(int(*(*C.int)(a)) & 63)
	if *(*C.int)(b)&31 == 1 {
		C.deep(2, 3)
	}
	return *(*C.int)(a) - *(*C.int)(b)
}

//go:noinline
func work(n int) {
	C.deep(C.uint(n), 5)
	done := make(chan int)
	go func() { // a new goroutine has a small stack
		C.sort(C.int(n))
		close(done)
	}()
	<-done
}

func main() {
	go func() {
		for n := 1; ; n++ {
			work(n)
		}
	}()
	for n := 0; ; n++ {
		work(n)
	}
}
