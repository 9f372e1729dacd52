// Capstan-adapter serves the GPU utilization of training workers to HorizontalPodAutoscalers, as external metrics.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/capstan-gpu/capstan/adapter"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
)

var version = "dev" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// hinted is an error that knows what to do.
type hinted struct {
	err  error
	hint string
}

func (h hinted) Error() string { return h.err.Error() }
func (h hinted) Unwrap() error { return h.err }

// found is an error about what a command was to look at: there is nothing wrong with the command line.
type found struct{ hinted }

// run is main with its surroundings as arguments. It returns 0, 1 for trouble while running or with what was to be looked at, or 2 for a
// wrong command line or a rule file that cannot be served.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := command(stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code, hint := 1, "the log says what came before; --log-level debug says more"
	if h, ok := errors.AsType[hinted](err); ok {
		code, hint = 2, h.hint
	} else if f, ok := errors.AsType[found](err); ok {
		hint = f.hint
	}
	fmt.Fprintf(stderr, "capstan-adapter: %s\nhint: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "), hint)
	return code
}

func command(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "capstan-adapter",
		Short: "Serves the GPU utilization of training workers to HorizontalPodAutoscalers",
		Long: `Serves the GPU utilization of training workers to HorizontalPodAutoscalers, as external metrics
(external.metrics.k8s.io). Values come from the capstan-exporter of every node; a value that is not known is an error,
never zero.`,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return hinted{fmt.Errorf("%q is no command", args[0]), "capstan-adapter --help lists the commands"}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return c.Help() },
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	wrong := func(c *cobra.Command, err error) error {
		return hinted{err, fmt.Sprintf("%s --help lists the flags", c.CommandPath())}
	}
	root.SetFlagErrorFunc(wrong)
	root.AddCommand(serveCommand(stderr), rulesCommand(stdout))
	return root
}

func serveCommand(stderr io.Writer) *cobra.Command {
	cfg := adapter.Config{Version: version, ShutdownDelay: 3 * time.Second}
	var ruleFile, level, format string
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the adapter",
		Long: `Run the adapter: collect from all exporters once an interval, evaluate the rules, serve the result.

In a cluster it needs no flags. Its probes are /livez (ticks begin on time) and /readyz (it has a certificate, knows the
workloads, has measured for a whole window, and no other product owns the APIService; /readyz/NAME says more about one check).
/metrics is on the same port, for those whom the API server lets get it.`,
		Example: `  capstan-adapter serve
  capstan-adapter serve --interval 2s --rules /etc/capstan/rules.yaml
  capstan-adapter serve --kubeconfig ~/.kube/config --secure-port 6443   # from outside, for development`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return hinted{fmt.Errorf("unexpected argument %q", args[0]), "capstan-adapter serve takes only flags"}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			log, err := logger(stderr, level, format)
			if err != nil {
				return err
			}
			slog.SetDefault(log)
			// A tick leaves garbage of about what lives: collecting it early costs a hundredth of a core at 1,000 nodes and saves a third of the
			// memory. GOGC says otherwise.
			if os.Getenv("GOGC") == "" {
				debug.SetGCPercent(25)
			}
			klog.SetSlogLogger(log.With("component", "kubernetes"))
			cfg.Logger = log
			if cfg.Rules, err = loadRules(ruleFile, cfg.Interval); err != nil {
				return err
			}
			if ruleFile != "" {
				cfg.Reload = func() ([]rules.Rule, error) { return loadRules(ruleFile, cfg.Interval) }
			}
			if err := cfg.Validate(); err != nil {
				return hinted{err, "change the flag or the rule file"}
			}
			cfg.Pod = os.Getenv("POD_NAME")
			if cfg.Pod == "" {
				cfg.Pod, _ = os.Hostname()
			}
			return adapter.Run(c.Context(), cfg)
		},
	}
	f := c.Flags()
	f.IntVar(&cfg.Port, "secure-port", 6443, "port that serves HTTPS")
	f.DurationVar(&cfg.Interval, "interval", 5*time.Second, "time between two rounds of collecting and evaluating; 15s above 500 nodes")
	f.StringVar(&ruleFile, "rules", "", "rule file, taken anew when it changes (default: the built-in rules)")
	f.StringVar(&cfg.ExporterNamespace, "exporter-namespace", "capstan-node", "namespace of the exporters")
	f.StringVar(&cfg.ExporterService, "exporter-service", "capstan-exporter", "Service whose EndpointSlices name the exporters")
	f.StringVar(&cfg.Namespace, "namespace", "capstan-system", "namespace of the adapter")
	f.StringVar(&cfg.Secret, "tls-secret", "capstan-adapter-tls", "Secret that keeps CA and certificate; made if absent")
	f.StringVar(&cfg.ExporterSecret, "exporter-tls-secret", "capstan-exporter-tls", "Secret in the exporters' namespace that gives them their certificate; made if absent")
	f.StringVar(&cfg.ScrapeSecret, "scrape-tls-secret", "capstan-scrape-tls", "Secret in the exporters' namespace with a certificate for others that the exporters let in, such as a Prometheus; made if absent")
	f.StringVar(&cfg.Service, "service-name", "capstan-adapter", "Service that the APIService names")
	f.StringSliceVar(&cfg.APIServices, "apiservices", []string{adapter.External}, "APIServices that are the adapter's; also "+adapter.CustomBeta1+" and "+adapter.CustomBeta2+", for HPAs with metrics of type Pods")
	f.DurationVar(&cfg.CAValidity, "ca-validity", 5*365*24*time.Hour, "how long a new CA lives; it is renewed when a third of that remains")
	f.DurationVar(&cfg.CertValidity, "cert-validity", 90*24*time.Hour, "how long a new certificate lives; likewise")
	f.StringVar(&cfg.Kubeconfig, "kubeconfig", "", "kubeconfig file (default: in-cluster)")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&format, "log-format", "text", "text or json")
	return c
}

// loadRules reads a rule file, or takes the built-in rules and fits them to a longer interval than the usual one.
func loadRules(file string, interval time.Duration) ([]rules.Rule, error) {
	if file == "" {
		list := rules.Default()
		for i := range list {
			r := &list[i]
			r.MaxAge = max(r.MaxAge, 3*interval)
			r.HoldFor = max(r.HoldFor, r.Window+3*interval)
		}
		return list, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, hinted{err, "--rules names a file; without it the built-in rules are used"}
	}
	list, problems := rules.Check(file, data, interval)
	if err := document.Refused(problems); err != nil {
		return nil, hinted{err, "capstan-adapter rules check " + file + " checks it again"}
	}
	return list, nil
}

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, hinted{fmt.Errorf("--log-level is %q", level), "use debug, info, warn or error"}
	}
	options := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, hinted{fmt.Errorf("--log-format is %q", format), "use text or json"}
}
