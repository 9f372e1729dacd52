// Fakegpu is a simulated NVIDIA driver for a node without GPUs: a libnvidia-ml.so.1 that shows what a state file says, a daemon that
// makes that follow what the workers do, a device plugin that hands the GPUs to pods, and commands to pin values and to let calls fail.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/test/fakegpu/plugin"
	"github.com/capstan-gpu/capstan/test/fakegpu/state"
)

var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "fakegpu:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var dir string
	root := &cobra.Command{
		Use:     "fakegpu",
		Short:   "A simulated NVIDIA driver",
		Version: version,
		Long: `Fakegpu simulates an NVIDIA driver at the boundary of libnvidia-ml.so.1. Everything of a node is in one folder: lib/ with the
library, state with what the GPUs show, busy/ with how busy the workers say they are.`,
		Example: `  fakegpu daemon --dir /tmp/gpu --node laptop --no-plugin --library ./libnvidia-ml.so.1
  fakegpu --dir /tmp/gpu set --gpu 0 --utilization 95
  fakegpu --dir /tmp/gpu call nvmlDeviceGetUtilizationRates --gpu 1 --code 15 --after 10
  FAKEGPU_STATE=/tmp/gpu/state LD_LIBRARY_PATH=/tmp/gpu/lib capstan-exporter --once`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&dir, "dir", "/fakegpu", "the node's folder")
	open := func(f func(*state.File) error) error {
		file, err := state.Open(filepath.Join(dir, "state"))
		if err != nil {
			return fmt.Errorf("%w\n  start the daemon first: fakegpu daemon --dir %s", err, dir)
		}
		defer file.Close()
		return f(file)
	}
	root.AddCommand(daemonCommand(&dir), setCommand(open), unsetCommand(open), callCommand(open), logCommand(open), showCommand(open), driverCommand(open), libraryCommand(&dir), xidCommand(open), migCommand(open), fieldCommand(open))
	return root
}

type opener func(func(*state.File) error) error

func daemonCommand(dir *string) *cobra.Command {
	var (
		node, library, kubelet, host, resource string
		profile                                string
		gpus, replicas                         int
		noPlugin                               bool
	)
	c := &cobra.Command{
		Use:   "daemon",
		Short: "Keep the state up to date and hand the GPUs to pods",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if node == "" {
				return errors.New("--node is empty: the GPUs' names follow from it; give the node's name")
			}
			if replicas < 1 || replicas > 64 {
				return fmt.Errorf("--replicas %d: must be 1 to 64", replicas)
			}
			kind, err := state.ProfileNamed(profile)
			if err != nil {
				return fmt.Errorf("--profile: %w", err)
			}
			logger := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			busy := filepath.Join(*dir, "busy")
			if err := os.MkdirAll(busy, 0o777); err != nil {
				return err
			}
			if err := os.Chmod(busy, 0o777); err != nil { // whatever the umask: workers are not root
				return err
			}
			if err := install(library, *dir); err != nil {
				return err
			}
			file, err := state.Create(filepath.Join(*dir, "state"), node, gpus, kind)
			if err != nil {
				return err
			}
			defer file.Close()
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return follow(ctx, file, busy) })
			if !noPlugin {
				p := plugin.New(plugin.Config{Dir: kubelet, Resource: resource, Devices: deviceIDs(file, replicas), HostDir: host, MountDir: "/fakegpu", Logger: logger})
				group.Go(func() error { return p.Run(ctx) })
			}
			return group.Wait()
		},
	}
	f := c.Flags()
	f.StringVar(&node, "node", os.Getenv("NODE_NAME"), "the node's name, from which the GPUs' UUIDs follow")
	f.IntVar(&gpus, "gpus", 8, "number of GPUs")
	f.StringVar(&profile, "profile", state.Profiles[0].Name, "kind of GPU: "+profileNames())
	f.IntVar(&replicas, "replicas", 1, "pods that may share a GPU; more than 1 makes the device ids UUID::N")
	f.StringVar(&resource, "resource", "nvidia.com/gpu", "name of the resource that pods ask for")
	f.StringVar(&library, "library", imageLibrary, "the compiled libnvidia-ml.so.1 to put into the folder")
	f.StringVar(&kubelet, "kubelet-dir", "/var/lib/kubelet/device-plugins", "the kubelet's folder of plugin sockets")
	f.StringVar(&host, "host-dir", "/var/lib/fakegpu", "the folder's path on the node, for the pods' mounts")
	f.BoolVar(&noPlugin, "no-plugin", false, "hand the GPUs to nobody: no kubelet is needed")
	return c
}

func profileNames() string {
	var names []string
	for _, p := range state.Profiles {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// deviceIDs are the ids that the kubelet hands out: those of the GPUs, or of their instances where MIG is on.
func deviceIDs(file *state.File, replicas int) (ids []string) {
	add := func(uuid string) {
		if replicas == 1 {
			ids = append(ids, uuid)
			return
		}
		for r := range replicas {
			ids = append(ids, fmt.Sprintf("%s::%d", uuid, r))
		}
	}
	for i := range file.Count() {
		g := file.GPU(i)
		if g.MIG == 0 {
			add(g.UUID())
			continue
		}
		for k := range g.Instances {
			if uuid := g.Instances[k].UUID(); uuid != "" {
				add(uuid)
			}
		}
	}
	return ids
}

// chosen are the GPUs that a flag names: an index, a UUID, or all.
func chosen(file *state.File, flag string) (indexes []int, err error) {
	for i := range file.Count() {
		g := file.GPU(i)
		if flag == "" || flag == g.UUID() || flag == strconv.Itoa(i) {
			indexes = append(indexes, i)
		}
	}
	if len(indexes) == 0 {
		return nil, fmt.Errorf("--gpu %q: there are %d GPUs; name one by its index or UUID (fakegpu show lists them)", flag, file.Count())
	}
	return indexes, nil
}

func setCommand(open opener) *cobra.Command {
	var (
		gpu                             string
		utilization, power, temperature int
		memory                          int64
	)
	c := &cobra.Command{
		Use:     "set",
		Short:   "Pin what GPUs show, until unset",
		Example: "  fakegpu set --gpu 0 --utilization 95 --temperature 81",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := cmd.Flags().Changed
			if !given("utilization") && !given("power") && !given("temperature") && !given("memory-used") {
				return errors.New("nothing to set: give --utilization, --power, --temperature or --memory-used")
			}
			// Above 100 % is garbage that real drivers have been seen to give.
			if utilization < 0 || power < 0 || power > 4_000_000 || temperature < 0 || memory < 0 {
				return errors.New("values must not be negative (nor --power above 4000000 W)")
			}
			return open(func(file *state.File) error {
				which, err := chosen(file, gpu)
				if err != nil {
					return err
				}
				for _, i := range which {
					err := file.Update(i, func(g *state.GPU) {
						if given("utilization") {
							g.Utilization, g.Pinned = uint32(utilization), g.Pinned|state.PinUtilization
						}
						if given("power") {
							g.PowerMilliwatts, g.Pinned = uint32(power)*1000, g.Pinned|state.PinPower
						}
						if given("temperature") {
							g.Temperature, g.Pinned = uint32(temperature), g.Pinned|state.PinTemperature
						}
						if given("memory-used") {
							g.MemoryUsed, g.Pinned = uint64(memory), g.Pinned|state.PinMemory
						}
					})
					if err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	f := c.Flags()
	f.StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	f.IntVar(&utilization, "utilization", 0, "percent")
	f.IntVar(&power, "power", 0, "watts")
	f.IntVar(&temperature, "temperature", 0, "degrees Celsius")
	f.Int64Var(&memory, "memory-used", 0, "bytes")
	return c
}

func unsetCommand(open opener) *cobra.Command {
	var gpu string
	c := &cobra.Command{Use: "unset", Short: "Let GPUs show again what their workers do", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return open(func(file *state.File) error {
			which, err := chosen(file, gpu)
			for _, i := range which {
				err = errors.Join(err, file.Update(i, func(g *state.GPU) {
					g.Pinned = 0
					g.Utilization = 0
				}))
			}
			return err
		})
	}}
	c.Flags().StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	return c
}

func callCommand(open opener) *cobra.Command {
	var (
		gpu     string
		code    int32
		latency time.Duration
		after   uint64
	)
	c := &cobra.Command{
		Use:   "call FUNCTION",
		Short: "Let an NVML function fail, or be slow",
		Example: `  fakegpu call nvmlDeviceGetUtilizationRates --gpu 1 --code 15 --after 10    GPU_IS_LOST from the 11th call on
  fakegpu call nvmlDeviceGetPowerUsage --latency 2s                           slow on every GPU
  fakegpu call nvmlDeviceGetPowerUsage                                        as it should be`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.FixedCompletions(state.Functions, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(_ *cobra.Command, args []string) error {
			return open(func(file *state.File) error {
				if gpu == "" {
					return file.Fail(args[0], state.AnyGPU, code, latency, after)
				}
				which, err := chosen(file, gpu)
				if err != nil {
					return err
				}
				return file.Fail(args[0], which[0], code, latency, after)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	f.Int32Var(&code, "code", 0, "nvmlReturn_t to answer; 0 = the truth")
	f.DurationVar(&latency, "latency", 0, "how long the call takes")
	f.Uint64Var(&after, "after", 0, "calls that are still good")
	return c
}

func logCommand(open opener) *cobra.Command {
	var clearIt bool
	c := &cobra.Command{Use: "log", Short: "Say how often each NVML function was called", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return open(func(file *state.File) error {
			if clearIt {
				file.Clear()
				return nil
			}
			counts := file.Counts()
			names := append([]string(nil), state.Functions...)
			sort.SliceStable(names, func(i, j int) bool { return counts[names[i]] > counts[names[j]] })
			for _, n := range names {
				if counts[n] > 0 {
					fmt.Fprintf(cmd.OutOrStdout(), "%8d  %s\n", counts[n], n)
				}
			}
			return nil
		})
	}}
	c.Flags().BoolVar(&clearIt, "clear", false, "forget them")
	return c
}

// shown is one GPU for show.
type shown struct {
	Index       int    `json:"index"`
	UUID        string `json:"uuid"`
	Model       string `json:"model"`
	Utilization uint32 `json:"utilizationPercent"`
	PowerWatts  uint32 `json:"powerWatts"`
	Celsius     uint32 `json:"temperatureCelsius"`
	MemoryUsed  uint64 `json:"memoryUsedBytes"`
	Pinned      bool   `json:"pinned"`
}

func showCommand(open opener) *cobra.Command {
	var output string
	c := &cobra.Command{Use: "show", Short: "Say what the GPUs show", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return open(func(file *state.File) error {
			var all []shown
			for i := range file.Count() {
				g := file.GPU(i)
				all = append(all, shown{i, g.UUID(), g.Name(), g.Utilization, g.PowerMilliwatts / 1000, g.Temperature, g.MemoryUsed, g.Pinned != 0})
			}
			return show(cmd.OutOrStdout(), all, output)
		})
	}}
	c.Flags().StringVarP(&output, "output", "o", "", `"json" for programs`)
	return c
}

func show(w io.Writer, all []shown, output string) error {
	switch output {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(all)
	case "":
		table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(table, "GPU\tUUID\tUTILIZATION\tPOWER\tTEMPERATURE\tMEMORY USED\t")
		for _, g := range all {
			pinned := ""
			if g.Pinned {
				pinned = "pinned"
			}
			fmt.Fprintf(table, "%d\t%s\t%d %%\t%d W\t%d °C\t%d MiB\t%s\n", g.Index, g.UUID, g.Utilization, g.PowerWatts, g.Celsius, g.MemoryUsed>>20, pinned)
		}
		return table.Flush()
	}
	return fmt.Errorf("-o %q: there is only json", output)
}

func xidCommand(open opener) *cobra.Command {
	var gpu string
	c := &cobra.Command{Use: "xid NUMBER", Short: "Let GPUs report an XID error", Example: "  fakegpu xid 79 --gpu 0", Args: cobra.ExactArgs(1), RunE: func(_ *cobra.Command, args []string) error {
		xid, err := strconv.ParseUint(args[0], 10, 32)
		if err != nil {
			return fmt.Errorf("XID %q: must be a number, like 79", args[0])
		}
		return open(func(file *state.File) error {
			which, err := chosen(file, gpu)
			for _, i := range which {
				err = errors.Join(err, file.XID(i, xid))
			}
			return err
		})
	}}
	c.Flags().StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	return c
}

func migCommand(open opener) *cobra.Command {
	var gpu string
	c := &cobra.Command{Use: "mig [PROFILE ...]", Short: "Divide GPUs into MIG instances; without a profile MIG is off",
		Example: "  fakegpu mig --gpu 0 3g.40gb 2g.20gb 1g.10gb\n  fakegpu mig --gpu 0", RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 7 {
				return fmt.Errorf("%d instances: a GPU has at most 7", len(args))
			}
			return open(func(file *state.File) error {
				which, err := chosen(file, gpu)
				for _, i := range which {
					err = errors.Join(err, file.Update(i, func(g *state.GPU) { g.SetInstances(args...) }))
				}
				return err
			})
		}}
	c.Flags().StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	return c
}

func fieldCommand(open opener) *cobra.Command {
	var (
		gpu  string
		code int32
	)
	c := &cobra.Command{Use: "field ID VALUE", Short: "Set one value of nvmlDeviceGetFieldValues, or its own return code",
		Example: "  fakegpu field 4 1 --gpu 0            one double-bit ECC error\n  fakegpu field 230 0 --code 3        no recovery action on this driver",
		Args:    cobra.ExactArgs(2), RunE: func(_ *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 32)
			if err != nil || id == 0 {
				return fmt.Errorf("field %q: must be a number of nvml.h, like 230", args[0])
			}
			value, err := strconv.ParseUint(args[1], 10, 64)
			if err != nil {
				return fmt.Errorf("value %q: must be a whole number", args[1])
			}
			return open(func(file *state.File) error {
				which, err := chosen(file, gpu)
				for _, i := range which {
					err = errors.Join(err, file.Update(i, func(g *state.GPU) { g.SetField(uint32(id), state.UnsignedLong64, value, code) }))
				}
				return err
			})
		}}
	c.Flags().StringVar(&gpu, "gpu", "", "index or UUID (default: every GPU)")
	c.Flags().Int32Var(&code, "code", 0, "nvmlReturn_t of this value; 0 = it is good")
	return c
}

func driverCommand(open opener) *cobra.Command {
	return &cobra.Command{
		Use:   "upgrade VERSION",
		Short: "Replace the driver under the processes that have opened it",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return open(func(f *state.File) error { return f.Upgrade(args[0]) })
		},
	}
}

func libraryCommand(dir *string) *cobra.Command {
	var library string
	c := &cobra.Command{Use: "library", Short: "Take the library away from the node, or put it back"}
	put := &cobra.Command{Use: "install", Short: "Put it back", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return install(library, *dir) }}
	put.Flags().StringVar(&library, "library", imageLibrary, "the compiled libnvidia-ml.so.1")
	c.AddCommand(put, &cobra.Command{Use: "remove", Short: "Take it away: programs that start from now on find none", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error {
		return os.Remove(libraryIn(*dir))
	}})
	return c
}
