// Typical work of Go programs: calls, maps, channels, formatting, assembly, garbage collection.
package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"sort"
	"strings"
	"sync"
	"time"
)

type node struct {
	Left, Right *node
	Name        string
}

//go:noinline
func fib(n int) int {
	if n < 2 {
		return n
	}
	return fib(n-1) + fib(n-2)
}

// Recurses deeper than a new goroutine's stack, which therefore grows.
//
//go:noinline
func deep(n int) int {
	var buffer [200]byte
	if n == 0 {
		return len(buffer)
	}
	buffer[n%len(buffer)] = byte(n)
	return deep(n-1) + int(buffer[n%7])
}

func tree(depth int) *node {
	if depth == 0 {
		return nil
	}
	return &node{tree(depth - 1), tree(depth - 1), strings.Repeat("x", depth)}
}

func closes() (text string) {
	defer func() { text = fmt.Sprint(recover()) }()
	panic("on purpose")
}

func channels() {
	numbers, wait := make(chan int), sync.WaitGroup{}
	for i := 0; i < 4; i++ {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for n := range numbers {
				deep(n)
			}
		}()
	}
	for i := 0; i < 200; i++ {
		numbers <- i % 50
	}
	close(numbers)
	wait.Wait()
}

var from, to = make([]byte, 1<<16), make([]byte, 1<<16)

var pattern = regexp.MustCompile(`(\w+)@(\w+)\.org`)

func work(n int) {
	switch n % 12 {
	case 0:
		fib(21)
	case 1:
		json.Marshal(tree(9))
	case 2:
		words := strings.Fields(strings.Repeat("the quick brown fox ", 500))
		sort.Slice(words, func(i, j int) bool { return words[i] < words[j] })
	case 3:
		counts := map[string]int{}
		for i := 0; i < 3000; i++ {
			counts[fmt.Sprintf("%d-%x", i%700, i)]++
		}
	case 4:
		sha256.Sum256(make([]byte, 200000))
	case 5:
		zipped := gzip.NewWriter(io.Discard)
		zipped.Write(bytes.Repeat([]byte("some text "), 5000))
		zipped.Close()
	case 6:
		channels()
	case 7:
		pattern.FindAllString(strings.Repeat("someone@example.org ", 200), -1)
	case 8:
		for i := 0; i < 5000; i++ {
			time.Now()
		}
	case 9:
		for i := 0; i < 300; i++ {
			closes()
		}
	case 10:
		for i := 0; i < 300; i++ {
			os.Stat("/usr/lib")
		}
	default:
		for i := 0; i < 200; i++ {
			copy(to, from)
			bytes.Equal(from, to)
		}
	}
}

func main() {
	go func() {
		for n := 0; ; n++ {
			work(n)
		}
	}()
	for n := 6; ; n++ {
		work(n)
	}
}
