//go:build withcgo

package main

// int one(void) { return 1; }
import "C"

func init() { C.one() }
