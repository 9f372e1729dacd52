package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/exporter"
	"github.com/capstan-gpu/capstan/exporter/cgroup"
	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/metricname"
)

// errUsage marks flags that cannot be what was meant.
var errUsage = errors.New("wrong flags")

// What a node can bear; package exporter allows less, for tests.
const (
	leastInterval        = 100 * time.Millisecond // the driver serves one caller at a time, and training is another
	leastMappingInterval = 500 * time.Millisecond // the kubelet answers 100 calls a second, of all its clients together
)

// usage words a wrong flag as one line, with the flags' names in place of the fields'.
func usage(err error) error {
	fields := strings.NewReplacer("MappingInterval", "--mapping-interval", "MappingMaxAge", "--mapping-max-age", "StatsInterval", "--stats-interval",
		"Interval", "--interval", "KubeletDir", "--kubelet-dir", "StuckAfter", "--stuck-after", "ProbeListen", "--probe-listen", "LocalListen", "--local-listen", "Listen", "--listen", "WebConfig", "--web-config", "PodLabels", "--pod-labels", "\n", "; ")
	return fmt.Errorf("%w: %s", errUsage, fields.Replace(err.Error()))
}

func command() *cobra.Command {
	var (
		cfg               exporter.Config
		library, node     string
		profile, compat   string
		record            string
		detail, processes bool
		level             slog.Level
		once              bool
		output, logFormat string
	)
	c := &cobra.Command{
		Use:   "capstan-exporter",
		Short: "Serve what this node's GPUs, their pods and trainers do, for Prometheus and Capstan's adapter",
		Long: `Serve what this node's GPUs, their pods and their trainers do, for Prometheus and Capstan's adapter.

The GPUs are read through libnvidia-ml.so.1, who holds them is asked of the kubelet (its pod-resources and Pods API, so Kubernetes 1.37 or
its feature gate PodsAPI), and trainers are asked for their stats page where a pod has the annotation capstan.dev/stats-port.
A scrape does none of this: it shows what was known last. What is not known is absent, never 0.

/metrics is the page, /livez says whether the collection goes on, /readyz whether it has begun, and what is missing and why.`,
		Example: `  # As in the DaemonSet
  capstan-exporter --node-name "$NODE_NAME"

  # What can be read here, once, for people
  capstan-exporter --once

  # Look at a page of the exporter of a node
  kubectl -n capstan-node exec POD -- capstan-exporter get /readyz

  # Let go of the driver, for a change of it, and take it up again (on a node: kubectl exec POD -- capstan-exporter release)
  capstan-exporter release
  capstan-exporter resume

  # Try dashboards and rules without any GPU
  capstan-exporter --simulate mixed --listen 127.0.0.1:9401

  # With the simulated driver
  LD_LIBRARY_PATH=/fakegpu/lib FAKEGPU_STATE=/fakegpu/state capstan-exporter --listen 127.0.0.1:9401`,
		Version: version,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return usage(err)
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return usage(fmt.Errorf("--output is %q: want table or json", output))
			}
			if once {
				level = max(level, slog.LevelWarn)
			}
			logger, err := newLogger(cmd.ErrOrStderr(), logFormat, level)
			if err != nil {
				return err
			}
			cfg.Logger = logger.With("node", node)
			config := gpu.Config{LibraryPath: library, Detail: detail || compat == "dcgm", Logger: cfg.Logger}
			if record != "" {
				file, err := os.OpenFile(record, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
				if err != nil {
					return usage(fmt.Errorf("--record: %w", err))
				}
				defer file.Close()
				config.Record = file
			}
			if processes {
				config.PodOf = cgroup.Of
			}
			cfg.GPU = gpu.New(config)
			cfg.NodeName = node
			if compat != "" && compat != "dcgm" {
				return usage(fmt.Errorf("--compat is %q: there is only dcgm", compat))
			}
			cfg.CompatDCGM = compat == "dcgm"
			if profile != "" {
				if err := simulate(&cfg, profile, config); err != nil {
					return usage(fmt.Errorf("--simulate: %w", err))
				}
			}
			cfg.Registry = newRegistry(node)
			if cfg.Interval < leastInterval {
				//lint:ignore ST1005 it begins with a field's name, in the place of which usage puts the flag's
				return usage(fmt.Errorf("Interval is %s: want 100ms to 1m0s", cfg.Interval))
			}
			if cfg.MappingInterval < leastMappingInterval {
				return usage(fmt.Errorf("MappingInterval is %s: want 500ms to 1m0s", cfg.MappingInterval))
			}
			if err := cfg.Validate(); err != nil {
				return usage(err)
			}
			if once {
				return show(cmd.Context(), cmd.OutOrStdout(), cfg, output)
			}
			release, stop := releaseOnSignals()
			defer stop()
			cfg.Release = release
			cfg.OnListen = func(a net.Addr) { cfg.Logger.Info("listening", "address", a, "version", version) }
			return exporter.Run(cmd.Context(), cfg)
		},
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	c.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	f := c.Flags()
	f.StringVar(&cfg.Listen, "listen", ":9401", "serve HTTP on this address")
	f.StringVar(&cfg.WebConfig, "web-config", "", "exporter-toolkit web configuration: TLS, client certificates and their names, users (default: plain HTTP)")
	f.StringVar(&cfg.ProbeListen, "probe-listen", "", "serve /livez and /readyz here too, in plain HTTP, for probes that have no certificate")
	f.StringVar(&cfg.LocalListen, "local-listen", "", "serve everything here too, in plain HTTP, on a loopback address: for capstan-exporter get and kubectl port-forward")
	f.DurationVar(&cfg.Interval, "interval", time.Second, "time between two readings of the GPUs, 100ms to 1m")
	f.StringVar(&node, "node-name", os.Getenv("NODE_NAME"), "name of this node, for the log and the build info")
	f.StringVar(&library, "nvml-library", "", "path of libnvidia-ml.so.1 (default: where the loader finds it)")
	f.BoolVar(&detail, "detail", false, "also read what few look at: memory clock and temperature, power limit and instant power, encoder, decoder and memory controller, PCIe replays, remapped rows")
	f.BoolVar(&processes, "processes", false, "also say what each pod's own processes use, for GPUs that pods share; needs the host's process ids (hostPID: true)")
	f.BoolVar(&cfg.HAMi, "hami", false, "believe HAMi's annotation which GPUs a pod was given; only where HAMi rules, since anybody can write it elsewhere")
	f.StringSliceVar(&cfg.PodLabels, "pod-labels", nil, "also serve these labels of pods that hold a GPU, at most 16, like team,app.kubernetes.io/name")
	f.StringVar(&record, "record", "", "write what the driver answers to this new file, at most 256 MiB, for a bug report")
	f.StringVar(&compat, "compat", "", "dcgm: also serve the names, labels and units of dcgm-exporter's default counters, for dashboards and rules made for it")
	f.StringVar(&profile, "simulate", "", "show eight GPUs that are not there, in the hands of pods that are not there, on any machine: "+strings.Join(gpu.SimulatedProfiles(), ", "))
	f.StringVar(&cfg.KubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's folder; of it pod-resources/ and pods-api/ are used")
	f.DurationVar(&cfg.MappingInterval, "mapping-interval", time.Second, "time between two questions to the kubelet who holds what, 500ms to 1m")
	f.DurationVar(&cfg.MappingMaxAge, "mapping-max-age", 30*time.Second, "how long its last good answer stands when it does not answer, at most 5m")
	f.DurationVar(&cfg.StatsInterval, "stats-interval", 5*time.Second, "time between two reads of a trainer's stats page, 1s to 5m")
	f.BoolVar(&cfg.HostNetworkTrainers, "host-network-trainers", false, "also read the stats pages of trainers in the host's network (RDMA); each needs a port of its own on the node")
	f.DurationVar(&cfg.StuckAfter, "stuck-after", time.Minute, "how long a reading of the GPUs may take before /livez says no")
	f.BoolVar(&once, "once", false, "print one reading and end")
	f.StringVarP(&output, "output", "o", "table", "with --once: table or json")
	f.TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	f.StringVar(&logFormat, "log-format", "text", "text or json")
	c.MarkFlagFilename("nvml-library")
	c.MarkFlagFilename("web-config", "yaml", "yml")
	c.MarkFlagFilename("record")
	c.MarkFlagDirname("kubelet-dir")
	c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("compat", cobra.FixedCompletions([]string{"dcgm"}, cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("simulate", cobra.FixedCompletions(gpu.SimulatedProfiles(), cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("log-format", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	c.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	c.AddCommand(getCommand(), releaseCommand(), resumeCommand())
	return c
}

// simulate puts a node that is not there in place of this one: its GPUs, and for each of these, or each instance of one, a pod of a
// StatefulSet that trains.
func simulate(cfg *exporter.Config, profile string, config gpu.Config) error {
	reader, err := gpu.Simulated(profile, config)
	if err != nil {
		return err
	}
	devices, err := gpu.SimulatedDevices(profile)
	if err != nil {
		return err
	}
	cfg.GPU = reader
	cfg.Mapping = func(now time.Time) podmap.Mapping {
		up := podmap.API{Up: true, Answered: now}
		m := podmap.Mapping{At: now, Resources: up, PodsAPI: up}
		for i, id := range devices {
			pod := fmt.Sprintf("mnist-training-worker-%d", i)
			uid := fmt.Sprintf("51000000-0000-4000-8000-%012d", i)
			m.Allocations = append(m.Allocations, podmap.Allocation{DeviceID: id, UUID: id, Namespace: "simulated", Pod: pod, PodUID: uid, Container: "worker", Resource: "nvidia.com/gpu"})
			m.Pods = append(m.Pods, podmap.Pod{Namespace: "simulated", Name: pod, UID: uid, Phase: "Running"})
		}
		return m
	}
	return nil
}

// releaseOnSignals turns SIGUSR1 into true and SIGUSR2 into false.
func releaseOnSignals() (<-chan bool, func()) {
	signals, release, done := make(chan os.Signal, 4), make(chan bool), make(chan struct{})
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for {
			select {
			case s := <-signals:
				select {
				case release <- s == syscall.SIGUSR1:
				case <-done:
					return
				}
			case <-done:
				return
			}
		}
	}()
	return release, func() { signal.Stop(signals); close(done) }
}

func newLogger(w io.Writer, format string, level slog.Level) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	default:
		return nil, usage(fmt.Errorf("--log-format is %q: want text or json", format))
	}
}

// newRegistry holds what is known of the process itself; the adapter takes process_start_time_seconds to tell the newer of two exporters.
func newRegistry(node string) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewGoCollector(),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: metricname.Prefix + "exporter_build_info", Help: "1; which exporter this is, and on which node.",
			ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version(), "node": strings.ToValidUTF8(node, "")},
		}, func() float64 { return 1 }))
	return registry
}
