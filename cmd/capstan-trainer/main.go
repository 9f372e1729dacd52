// Capstan-trainer is a stand-in for a training job: a source offers numbered samples at a rate that can be changed, workers pull
// their share and are busy for as long as computing it would take.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/trainer/stream"
)

var version = "dev" // set by the linker

func main() { os.Exit(run()) }

// run returns 0, 1 when something went wrong, 2 when the command was used wrongly.
func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := command().ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "capstan-trainer:", err)
	if wrong, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(os.Stderr, "  try:", wrong.hint)
		return 2
	}
	return 1
}

// usageError is a command that was used wrongly, and what to type instead.
type usageError struct {
	error
	hint string
}

func (u usageError) Unwrap() error { return u.error }

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "capstan-trainer",
		Short: "A stand-in training job whose load can be turned up and down",
		Long: `A stand-in for a training job: one source offers numbered samples at a rate, workers pull their share, and each sample is
counted once. A worker computes nothing; it is busy for as long as computing would take, and tells its simulated GPUs so.

The command ring is no stand-in: it trains, in a ring that is resized while it does.`,
		Example: `  capstan-trainer source --rate 100
  capstan-trainer worker --source http://localhost:8080 --capacity 100
  capstan-trainer rate 300
  capstan-trainer status
  capstan-trainer ring --steps 10000`,
		Version:       version,
		Args:          none,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageError{err, cmd.CommandPath() + " --help"} })
	root.AddCommand(sourceCommand(), workerCommand(), statusCommand(), rateCommand(), ringCommand())
	return root
}

func sourceCommand() *cobra.Command {
	var (
		cfg    stream.Config
		listen string
	)
	cmd := &cobra.Command{
		Use:     "source",
		Short:   "Offer numbered samples at a rate",
		Example: `  capstan-trainer source --rate 100 --listen :8080`,
		Args:    none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := logger(cmd)
			source, err := stream.NewSource(cfg, log)
			if err != nil {
				return usageError{err, "capstan-trainer source --rate 100"}
			}
			return serve(cmd.Context(), listen, source.Handler(), log, source.Run)
		},
	}
	cmd.Flags().Float64Var(&cfg.Rate, "rate", 100, "samples/s at first; PUT /rate or the rate command change it")
	cmd.Flags().DurationVar(&cfg.Lease, "lease", 5*time.Second, "how long a worker may keep samples before they go to another")
	cmd.Flags().StringVar(&listen, "listen", ":8080", "address to serve at")
	return cmd
}

func workerCommand() *cobra.Command {
	var (
		cfg             stream.WorkerConfig
		address, listen string
	)
	const example = `capstan-trainer worker --source http://mnist-training-source:8080 --capacity 100 --stats-listen :9402`
	cmd := &cobra.Command{
		Use:   "worker",
		Short: "Pull samples and be busy with them",
		Long: `Pull samples and be busy with them. At SIGTERM it hands back what it did not do, and exits 0 within two seconds.
If ` + stream.BusyFilesEnv + ` names files, its busy share goes there; the simulated GPUs follow it.`,
		Example: "  " + example,
		Args:    none,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			cfg.Logger = logger(cmd)
			if cfg.Source, err = stream.NewClient(address, nil); err != nil {
				return usageError{err, "--source http://localhost:8080"}
			}
			if cfg.Busy, err = stream.BusyFiles(os.Getenv(stream.BusyFilesEnv)); err != nil {
				return err
			}
			worker, err := stream.NewWorker(cfg)
			if err != nil {
				return usageError{err, example}
			}
			return serve(cmd.Context(), listen, worker.Handler(), cfg.Logger, worker.Run)
		},
	}
	name, _ := os.Hostname()
	cmd.Flags().StringVar(&address, "source", "http://localhost:8080", "address of the source")
	cmd.Flags().StringVar(&cfg.Name, "name", name, "this worker's name; in a pod the pod's")
	cmd.Flags().Float64Var(&cfg.Capacity, "capacity", 100, "samples/s that it can do, at least 1")
	cmd.Flags().DurationVar(&cfg.Step, "step", 100*time.Millisecond, "how long one full step takes, 1ms to 1s")
	cmd.Flags().StringVar(&listen, "stats-listen", ":9402", "address of the stats page /metrics and of /healthz")
	return cmd
}

func statusCommand() *cobra.Command {
	var address, output string
	const example = `capstan-trainer status --source http://localhost:8080 -o json`
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show a source's account",
		Example: "  " + example,
		Args:    none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usageError{fmt.Errorf("output %q: want text or json", output), example}
			}
			client, err := stream.NewClient(address, nil)
			if err != nil {
				return usageError{err, example}
			}
			status, err := client.Status(cmd.Context())
			if err != nil {
				return err
			}
			if output == "json" {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(status)
			}
			return table(cmd.OutOrStdout(), status)
		},
	}
	cmd.Flags().StringVar(&address, "source", "http://localhost:8080", "address of the source")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func table(w io.Writer, s stream.Status) error {
	fmt.Fprintf(w, "%g samples/s offered: %d so far, %d completed, %d wait, %d with workers, %d lost, %d completed twice\n",
		s.Rate, s.Offered, s.Completed, s.Backlog, s.Leased, s.Lost, s.Duplicates)
	if s.Returned > 0 {
		fmt.Fprintf(w, "%d came back from workers, and were refused %d times when done late\n", s.Returned, s.Late)
	}
	if len(s.Workers) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "WORKER\tCOMPLETED\tHAS")
	for _, name := range slices.Sorted(maps.Keys(s.Workers)) {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, s.Workers[name].Completed, s.Workers[name].Leased)
	}
	return t.Flush()
}

func rateCommand() *cobra.Command {
	var address string
	const example = `capstan-trainer rate 300 --source http://localhost:8080`
	cmd := &cobra.Command{
		Use:     "rate SAMPLES_PER_SECOND",
		Short:   "Change the rate at which a source offers samples",
		Example: "  " + example,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("rate: want one number, samples/s"), example}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			rate, err := strconv.ParseFloat(args[0], 64)
			if err != nil {
				return usageError{fmt.Errorf("rate %q: want a number, samples/s", args[0]), example}
			}
			client, err := stream.NewClient(address, nil)
			if err != nil {
				return usageError{err, example}
			}
			return client.SetRate(cmd.Context(), rate)
		},
	}
	cmd.Flags().StringVar(&address, "source", "http://localhost:8080", "address of the source")
	return cmd
}

func none(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%q is neither a command nor an argument of %s", args[0], cmd.CommandPath()), cmd.CommandPath() + " --help"}
	}
	return nil
}

func logger(cmd *cobra.Command) *slog.Logger {
	return slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
}

// serve runs a handler and a part beside it until ctx is done or one of them fails. The handler answers until the part has ended.
func serve(ctx context.Context, address string, handler http.Handler, log *slog.Logger, part func(context.Context) error) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	log.Info("serving", "address", listener.Addr().String(), "version", version)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // what waits for samples ends with us
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			cancel(fmt.Errorf("serve %s: %w", address, err))
		}
	})
	err = part(ctx)
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	cancel(nil)
	ending, stop := context.WithTimeout(context.WithoutCancel(ctx), 500*time.Millisecond)
	defer stop()
	if server.Shutdown(ending) != nil {
		server.Close()
	}
	serving.Wait()
	return err
}
