package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// getCommand asks the exporter that runs in the same container, or on the same machine.
func getCommand() *cobra.Command {
	var address string
	c := &cobra.Command{
		Use:   "get [PATH]",
		Short: "Print a page of the running exporter: /readyz, /metrics, /debug/state",
		Long: `Print a page of the exporter that runs here, by its --local-listen, which asks for no certificate.

Without a PATH, the page that lists the others. Ends with 1 if the answer is not 200: so "get /livez" is a check, too.`,
		Example: `  kubectl -n capstan-node exec POD -- capstan-exporter get /readyz
  kubectl -n capstan-node exec POD -- capstan-exporter get /metrics?name[]=capstan_gpu_busy_seconds_total`,
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: []string{"/metrics", "/debug/state", "/livez", "/readyz"},
		RunE: func(cmd *cobra.Command, args []string) error {
			path := "/" + strings.TrimPrefix(strings.Join(args, ""), "/")
			client := &http.Client{Timeout: 10 * time.Second}
			request, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, "http://"+address+path, nil)
			if err != nil {
				return usage(fmt.Errorf("%q with --address %q is no address of a page: %w", path, address, err))
			}
			response, err := client.Do(request)
			if err != nil {
				return fmt.Errorf("ask the exporter: %w (it has to run with --local-listen=%s)", err, address)
			}
			defer response.Body.Close()
			if _, err := io.Copy(cmd.OutOrStdout(), response.Body); err != nil {
				return fmt.Errorf("read %s: %w", path, err)
			}
			if response.StatusCode != http.StatusOK {
				return fmt.Errorf("%s answers %s", path, response.Status)
			}
			return nil
		},
	}
	c.Flags().StringVar(&address, "address", "127.0.0.1:9403", "the exporter's --local-listen")
	return c
}
