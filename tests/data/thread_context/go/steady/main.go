// A goroutine that computes with three labels, forever.
package main

import (
	"context"
	"runtime/pprof"
)

func main() {
	labels := pprof.Labels(
		"trace_id", "0af7651916cd43dd8448eb211c80319c", "span_id", "b7ad6b7169203331", "http.route", "/orders",
	)
	pprof.Do(context.Background(), labels, func(context.Context) {
		for {
		}
	})
}
