// Cluster runs a real Kubernetes of any number of nodes on one Linux machine: etcd, the control plane, kubelets with containerd,
// kube-proxy and CoreDNS, built from their Go modules and Debian's packages. Every node lives in namespaces of its own (network,
// mounts, processes, cgroups), so that its paths are those of a real node, stopping it is a power-off, and down leaves nothing
// behind. It is for tests and demonstrations, not for anything that must survive.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/test/kept"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			os.Exit(exit.ExitCode()) // kubectl has said what is wrong
		}
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "cluster",
		Short: "A real Kubernetes on this machine, for tests and demonstrations",
		Long: `Cluster starts a real Kubernetes on this Linux machine, as root: etcd, API server, controller manager (with the real HPA),
scheduler, and as many nodes with kubelet, containerd and kube-proxy as you like. Everything lives in namespaces that it makes,
is reachable on loopback, and is gone after "down". The first "up" builds Kubernetes from source, which takes minutes.`,
		Example: `  go run ./test/cluster up
  go run ./test/cluster kubectl get nodes
  go run ./test/cluster load dist/images/*.tar
  go run ./test/cluster node stop node-2
  go run ./test/cluster down`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	var dir string
	root.PersistentFlags().StringVar(&dir, "state", defaultState(), "folder of the cluster's keys, data and logs; must not be on /run, /var/lib or /var/log")

	config := Config{}
	up := &cobra.Command{
		Use:   "up",
		Short: "Start the cluster, or say that it runs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := possible(); err != nil {
				return err
			}
			if err := config.Validate(); err != nil {
				return err
			}
			return Up(cmd.Context(), dir, config, cmd.OutOrStdout())
		},
	}
	f := up.Flags()
	f.IntVar(&config.Nodes, "nodes", 2, "number of nodes, node-1 with the control plane included")
	f.StringVar(&config.HPASync, "hpa-sync-period", "5s", "how often the HPA controller looks (Kubernetes' default is 15s)")
	f.StringVar(&config.HPADown, "hpa-downscale-stabilization", "20s", "how long the HPA waits before it goes down (Kubernetes' default is 5m)")
	f.IntVar(&config.MaxPods, "max-pods", 110, "pods a node takes")

	var output string
	status := &cobra.Command{
		Use:   "status",
		Short: "Say what runs and where its files are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printStatus(cmd.OutOrStdout(), readStatus(dir), output)
		},
	}
	status.Flags().StringVarP(&output, "output", "o", "", `"json" for programs`)

	node := &cobra.Command{Use: "node", Short: "Power a node off or on"}
	node.AddCommand(
		&cobra.Command{Use: "stop NODE", Short: "Power a node off", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			return withCluster(dir, func(c *Cluster) error { return c.stopNode(args[0]) })
		}},
		&cobra.Command{Use: "start NODE", Short: "Power a node on", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			return withCluster(dir, func(c *Cluster) error { return c.powerOn(cmd.Context(), args[0]) })
		}},
	)

	root.AddCommand(up, status, node,
		&cobra.Command{Use: "down", Short: "End the cluster and remove what it left", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			return Down(dir)
		}},
		&cobra.Command{Use: "load IMAGE.tar…", Short: "Put images into every node", Args: cobra.MinimumNArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			return withCluster(dir, func(c *Cluster) error { return c.load(cmd.Context(), args, cmd.OutOrStdout()) })
		}},
		&cobra.Command{Use: "kubectl …", Short: "The cluster's own kubectl", DisableFlagParsing: true, RunE: func(cmd *cobra.Command, args []string) error {
			return withCluster(dir, func(c *Cluster) error {
				k := exec.CommandContext(cmd.Context(), c.bin("kubectl"), append([]string{"--kubeconfig", c.Kubeconfig()}, args...)...)
				k.Stdin, k.Stdout, k.Stderr = os.Stdin, os.Stdout, os.Stderr
				return k.Run()
			})
		}},
		&cobra.Command{Use: "node-init", Hidden: true, Args: cobra.ExactArgs(1), RunE: func(_ *cobra.Command, args []string) error {
			return nodeInit(dir, args[0])
		}},
		&cobra.Command{Use: "in-cgroup NODE COMMAND…", Hidden: true, DisableFlagParsing: true, RunE: func(_ *cobra.Command, args []string) error {
			return enterCgroup(args[0], args[1:])
		}},
		&cobra.Command{Use: "door TARGET", Hidden: true, Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			return serveDoor(cmd.Context(), args[0])
		}},
	)
	return root
}

// Config is what up is asked for.
type Config struct {
	Nodes   int
	HPASync string // a Go duration
	HPADown string // a Go duration
	MaxPods int
}

// Validate names the flag, the value, the bound and the fix.
func (c Config) Validate() error {
	if c.Nodes < 1 || c.Nodes > 50 {
		return fmt.Errorf("--nodes %d: must be 1 to 50", c.Nodes)
	}
	for flag, value := range map[string]string{"--hpa-sync-period": c.HPASync, "--hpa-downscale-stabilization": c.HPADown} {
		if d, err := time.ParseDuration(value); err != nil || d <= 0 {
			return fmt.Errorf("%s %q: must be a positive duration like 5s", flag, value)
		}
	}
	if c.MaxPods < 5 || c.MaxPods > 500 {
		return fmt.Errorf("--max-pods %d: must be 5 to 500", c.MaxPods)
	}
	return nil
}

// possible says why no cluster can run here, and what else there is.
func possible() error {
	const instead = "\n  with a cluster of your own: make demo KUBECONFIG=… REGISTRY=… pushes the images to the registry and runs there"
	if runtime.GOOS != "linux" {
		return fmt.Errorf("needs Linux (namespaces and cgroups), this is %s%s", runtime.GOOS, instead)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("needs root for namespaces, mounts and cgroups, this is uid %d: try sudo%s", os.Geteuid(), instead)
	}
	return nil
}

func defaultState() string { return "/var/tmp/capstan-cluster" }

// Status is the cluster as others need to know it.
type Status struct {
	Running    bool              `json:"running"`
	Kubernetes string            `json:"kubernetes"`
	Nodes      map[string]string `json:"nodes,omitempty"` // name → "up" or "off"
	State      string            `json:"state"`
	Kubeconfig string            `json:"kubeconfig"`
	Kubectl    string            `json:"kubectl"`
	Logs       string            `json:"logs"`
	AuditLog   string            `json:"auditLog"`
	Cache      string            `json:"cache"`
	HPA        map[string]string `json:"hpa,omitempty"`
}

func readStatus(dir string) Status {
	c := &Cluster{Dir: dir}
	known := c.read() == nil
	s := Status{Kubernetes: kubernetesVersion, State: dir, Kubeconfig: c.Kubeconfig(), Kubectl: c.bin("kubectl"), Logs: c.path("log"), AuditLog: c.path("log", "audit.log"), Cache: kept.Folder()}
	if !known || !c.process("apiserver").alive() {
		return s
	}
	s.Running = true
	s.HPA = map[string]string{"syncPeriod": c.Config.HPASync, "downscaleStabilization": c.Config.HPADown}
	s.Nodes = map[string]string{}
	for i := range c.Config.Nodes {
		n := newNode(i + 1)
		s.Nodes[n.Name] = "off"
		if c.process(n.Name).alive() {
			s.Nodes[n.Name] = "up"
		}
	}
	return s
}

func printStatus(w io.Writer, s Status, output string) error {
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(s)
	}
	if output != "" {
		return fmt.Errorf("-o %q: there is only json", output)
	}
	if !s.Running {
		fmt.Fprintln(w, "no cluster runs; start one: go run ./test/cluster up")
		return nil
	}
	var nodes []string
	for name, state := range s.Nodes {
		nodes = append(nodes, name+" "+state)
	}
	sort.Strings(nodes)
	fmt.Fprintf(w, "Kubernetes v%s, %s\n", s.Kubernetes, strings.Join(nodes, ", "))
	for _, row := range [][2]string{{"KUBECONFIG", s.Kubeconfig}, {"kubectl", s.Kubectl}, {"logs", s.Logs}, {"audit log", s.AuditLog}, {"built binaries", s.Cache},
		{"HPA", "sync every " + s.HPA["syncPeriod"] + ", down after " + s.HPA["downscaleStabilization"]}} {
		fmt.Fprintf(w, "  %-15s %s\n", row[0], row[1])
	}
	return nil
}

func withCluster(dir string, f func(*Cluster) error) error {
	if err := possible(); err != nil {
		return err
	}
	c := &Cluster{Dir: dir}
	if err := c.read(); err != nil {
		return fmt.Errorf("no cluster in %s: start one: go run ./test/cluster up", dir)
	}
	return f(c)
}

// progress prints lines with the time since its start, and keeps a person company during long steps.
type progress struct {
	w     io.Writer
	began time.Time
}

func (p *progress) say(format string, args ...any) {
	fmt.Fprintf(p.w, "%5.1fs  %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}

// during runs f and says every half minute that it still does.
func (p *progress) during(what string, f func() error) error {
	p.say("%s", what)
	done := make(chan error, 1)
	go func() { done <- f() }()
	for {
		select {
		case err := <-done:
			return err
		case <-time.After(30 * time.Second):
			p.say("… still %s", what)
		}
	}
}

var errNoRoot = errors.New("not inside a checkout of Capstan")

// repository is the folder with go.mod and this program's source.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "test", "cluster", "components", "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s: %w", dir, errNoRoot)
		}
	}
}
