// Goroutines that change their labels, including span ids, at random, and log the ids.
//
// Arguments: payload of a process context or "-", log, number of goroutines. Prints "ready"; ends
// when its standard input ends. Lines of the log, little-endian: boottimes in nanoseconds before
// and after the labels are set, and before and after they are replaced; the thread id, 0 if the
// goroutine may run on any thread; trace id, span id. If the goroutine gave up its thread in
// between, Since is after Until.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand"
	"os"
	"runtime"
	"runtime/pprof"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

type line struct {
	Begin, Since, Until, End, Thread uint64
	Trace                            [16]byte
	Span                             [8]byte
}

var (
	last    atomic.Uint64
	stopped atomic.Bool
	sink    atomic.Uint64
)

func now() uint64 {
	var t syscall.Timespec
	syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, 7, uintptr(unsafe.Pointer(&t)), 0)
	return uint64(t.Nano())
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// Publishes a process context in a memfd mapping, with the header of OTEP 4719.
func publish(path string) {
	payload, err := os.ReadFile(path)
	check(err)
	name := []byte("OTEL_CTX\x00")
	fd, _, number := syscall.Syscall(319, uintptr(unsafe.Pointer(&name[0])), 1, 0)
	if number != 0 {
		panic(number)
	}
	check(syscall.Ftruncate(int(fd), 65536))
	data, err := syscall.Mmap(int(fd), 0, 65536, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE)
	check(err)
	copy(data[4096:], payload)
	copy(data, "OTEL_CTX")
	binary.LittleEndian.PutUint32(data[8:], 2)
	binary.LittleEndian.PutUint32(data[12:], uint32(len(payload)))
	binary.LittleEndian.PutUint64(data[24:], uint64(uintptr(unsafe.Pointer(&data[4096]))))
	binary.LittleEndian.PutUint64(data[16:], now())
}

var compute = func(duration time.Duration) {
	for end := time.Now().Add(duration); time.Now().Before(end); {
		sink.Add(1)
	}
}

// Computes for a while, on the goroutine's stack or in the runtime, or lets other goroutines run;
// returns whether it only computed.
func work(random *rand.Rand) bool {
	switch random.Intn(6) {
	case 0, 1, 2:
		compute(time.Duration(random.Intn(3000)) * time.Microsecond)
		return true
	case 3:
		for count := random.Intn(200); count > 0; count-- {
			runtime.Gosched()
		}
	case 4:
		for count := random.Intn(200); count > 0; count-- {
			sink.Add(uint64(len(make([]byte, 4096+random.Intn(4096)))))
		}
	default:
		time.Sleep(time.Duration(random.Intn(3000)) * time.Microsecond)
	}
	return false
}

func run(number int, log *[]line) {
	random := rand.New(rand.NewSource(int64(number)))
	var thread uint64
	if number%2 == 0 {
		runtime.LockOSThread()
		thread = uint64(syscall.Gettid())
	}
	for !stopped.Load() {
		if random.Intn(4) == 0 {
			work(random)
		}
		id := last.Add(1)
		entry := line{Thread: thread}
		binary.BigEndian.PutUint64(entry.Trace[8:], id)
		binary.BigEndian.PutUint64(entry.Span[:], id)
		labels := []string{
			"trace_id", hex.EncodeToString(entry.Trace[:]),
			"span_id", hex.EncodeToString(entry.Span[:]),
		}
		for count := random.Intn(10); count > 0; count-- {
			labels = append(labels, "label"+strconv.Itoa(count), strconv.FormatUint(id, 10))
		}
		labeled := pprof.WithLabels(context.Background(), pprof.Labels(labels...))
		entry.Begin = now()
		pprof.SetGoroutineLabels(labeled)
		entry.Since = now()
		computed := work(random)
		entry.Until = now()
		pprof.SetGoroutineLabels(context.Background())
		entry.End = now()
		if !computed {
			entry.Since, entry.Until = entry.End, entry.Begin
		}
		*log = append(*log, entry)
	}
}

func main() {
	if os.Args[1] != "-" {
		publish(os.Args[1])
	}
	count, err := strconv.Atoi(os.Args[3])
	check(err)
	logs := make([][]line, count)
	var all sync.WaitGroup
	for number := range logs {
		all.Add(1)
		go func(number int) {
			defer all.Done()
			run(number, &logs[number])
		}(number)
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	stopped.Store(true)
	all.Wait()
	var written bytes.Buffer
	for _, lines := range logs {
		check(binary.Write(&written, binary.LittleEndian, lines))
	}
	check(os.WriteFile(os.Args[2], written.Bytes(), 0o644))
}
