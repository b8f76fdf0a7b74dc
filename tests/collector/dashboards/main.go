// Command dashboards checks a Grafana dashboard from its standard input with Grafana's schema: strict
// decoding of the dashboard, its panels and its queries, and the constraints of each field.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// check returns the schema's errors; an error whose list is empty means that there are none.
func check(text []byte) string {
	plugins.RegisterDefaultPlugins()
	var board dashboard.Dashboard
	for _, step := range []func() error{
		func() error { return board.UnmarshalJSONStrict(text) },
		func() error { return board.Validate() },
	} {
		if err := step(); err != nil && err.Error() != "" {
			return err.Error()
		}
	}
	return ""
}

func main() {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if complaint := check(text); complaint != "" {
		fmt.Println(complaint)
		os.Exit(1)
	}
	fmt.Println("valid")
}
