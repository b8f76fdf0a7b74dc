// A goroutine with invalid labels: at an unmapped or kernel address, or pointing to themselves; or
// too long, too many, or with absurd lengths.
package main

import (
	"fmt"
	"os"
	"strings"
	"unsafe"
)

//go:linkname setLabels runtime/pprof.runtime_setProfLabel
func setLabels(labels unsafe.Pointer)

type label struct{ key, value string }

type set struct{ list []label }

var (
	kept set
	loop [64]uintptr
)

func main() {
	number := func(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }
	switch os.Args[1] {
	case "wild":
		setLabels(number(0x123456789000))
	case "kernel":
		setLabels(number(0xffffffff81000000))
	case "itself":
		for index := range loop {
			loop[index] = uintptr(unsafe.Pointer(&loop))
		}
		setLabels(unsafe.Pointer(&loop))
	case "long":
		kept.list = []label{{"key", strings.Repeat("v", 1<<16)}, {strings.Repeat("k", 1<<16), "value"}}
		setLabels(unsafe.Pointer(&kept))
	case "many":
		for index := 0; index < 1000; index++ {
			kept.list = append(kept.list, label{fmt.Sprint("key", index), strings.Repeat("v", 100)})
		}
		setLabels(unsafe.Pointer(&kept))
	case "huge":
		text := [2]uintptr{1 << 62, 1 << 62}
		kept.list = make([]label, 4)
		kept.list[0].key = *(*string)(unsafe.Pointer(&text))
		setLabels(unsafe.Pointer(&kept))
	}
	fmt.Println("ready")
	go func() {
		os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	for {
	}
}
