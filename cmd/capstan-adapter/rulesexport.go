package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/rules/document"
	"github.com/capstan-gpu/capstan/rules/export"
)

func exportCommand(stdout io.Writer) *cobra.Command {
	var format string
	var interval time.Duration
	c := &cobra.Command{
		Use:   "export [FILE]",
		Short: "Write rules as recording rules of a Prometheus",
		Long: `Write rules as recording rules of a Prometheus: for dashboards, for alerts, or for an adapter that lets a Prometheus
evaluate. Without a FILE it writes the built-in rules.

The names follow Prometheus' convention level:metric:operations, such as namespace_pod:gpu_utilization:percent_rate1m. A
recorded series is a pod's value as it was measured; what the adapter holds, and what it answers with an error, is not in it.`,
		Example: `  capstan-adapter rules export > /etc/prometheus/capstan.yaml
  capstan-adapter rules export --format prometheusrule rules.yaml | kubectl -n monitoring apply --server-side -f -`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return hinted{fmt.Errorf("there are %d files", len(args)), "name one FILE, or none for the built-in rules"}
			}
			return nil
		},
		ValidArgsFunction: yamlFiles,
		RunE: func(c *cobra.Command, args []string) error {
			if interval < time.Second || interval > time.Hour || interval%time.Second != 0 {
				return hinted{fmt.Errorf("--interval is %s", interval), "use whole seconds from 1s to 1h"}
			}
			file := ""
			if len(args) > 0 {
				file = args[0]
			}
			list, problems, err := rulesOf(file, 0)
			if err != nil {
				return err
			}
			if err := document.Refused(problems); err != nil {
				return found{hinted{err, "capstan-adapter rules check " + file + " checks it again"}}
			}
			out, err := export.Rules(list, format, interval)
			if err != nil {
				return hinted{err, "capstan-adapter rules export --help says more"}
			}
			_, err = stdout.Write(out)
			return err
		},
	}
	c.Flags().StringVar(&format, "format", export.Prometheus, "prometheus (a rule file) or prometheusrule (an object of the Prometheus operator)")
	complete(c, "format", export.Prometheus, export.PrometheusRule)
	c.Flags().DurationVar(&interval, "interval", 15*time.Second, "how often Prometheus evaluates them; more often than it scrapes gives nothing new")
	return c
}
