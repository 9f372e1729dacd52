package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/reference"
	"github.com/capstan-gpu/capstan/trainer/ring"
)

// ringOptions are the flags of a worker of an elastic ring.
type ringOptions struct {
	training                        reference.Config
	ring                            ring.Config
	listen, dataListen, statsListen string
	namespace, pod                  string
}

func ringCommand() *cobra.Command {
	var o ringOptions
	c := &cobra.Command{
		Use:   "ring",
		Short: "Really train, as one worker of an elastic ring",
		Long: `Really train, as one worker of an elastic ring: softmax regression on numbered samples, with a fixed batch that the workers share.
The model in the end is the same, bit for bit, however often the ring was resized, and the ledger shows that each sample counted once.

It runs in a StatefulSet's pod, with the rights and the token that capstan-agent asks for (capstan-agent --help).`,
		Example: `  capstan-trainer ring --steps 10000
  capstan-trainer ring --steps 10000 --step-takes 100ms --checkpoints /checkpoints`,
		Args: none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			return trainInRing(cmd.Context(), o, log)
		},
	}
	f := c.Flags()
	f.Int64Var(&o.training.Steps, "steps", 1000, "steps of the job")
	f.IntVar(&o.training.Batch, "batch", 256, "samples of a step, of all workers together; a multiple of 16")
	f.Float64Var(&o.training.Rate, "learning-rate", 2, "rate of descent")
	f.DurationVar(&o.training.StepTakes, "step-takes", 0, "how long a step takes one worker at least; n workers take an n-th")
	f.StringVar(&o.training.Folder, "checkpoints", "", "folder of the checkpoint, which all workers see (default: none is kept)")
	f.IntVar(&o.ring.Min, "min", 1, "workers below which the ring pauses")
	f.DurationVar(&o.ring.ChangeInterval, "change-interval", time.Minute, "least time between two changes that only add workers")
	f.DurationVar(&o.ring.Settle, "settle", 3*time.Second, "how long a generation waits for more workers after the newest one")
	f.StringVar(&o.listen, "listen", ":29400", "address for the other workers' agents")
	f.StringVar(&o.dataListen, "data-listen", ":29401", "address for their gradients and states")
	f.StringVar(&o.statsListen, "stats-listen", ":9402", "address of /metrics, /status and /healthz")
	f.StringVar(&o.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the pod (default: $POD_NAMESPACE)")
	name, _ := os.Hostname()
	f.StringVar(&o.pod, "pod", cmp.Or(os.Getenv("POD_NAME"), name), "name of the pod (default: $POD_NAME, or the host's)")
	return c
}

// trainInRing runs until this worker has left the ring; after the job's end it stays, for a StatefulSet starts again what exits.
func trainInRing(ctx context.Context, o ringOptions, log *slog.Logger) error {
	if o.namespace == "" {
		return usageError{errors.New("--namespace is empty"), "set it, or POD_NAMESPACE by the downward API"}
	}
	in, err := rest.InClusterConfig()
	if err != nil {
		return usageError{fmt.Errorf("find the API server: %w", err), "run it in a StatefulSet's pod that has a ServiceAccount"}
	}
	api, err := kubernetes.NewForConfig(rest.AddUserAgent(in, "capstan-trainer/"+version))
	if err != nil {
		return err
	}
	var listeners [3]net.Listener
	for i, address := range []string{o.listen, o.dataListen, o.statsListen} {
		if listeners[i], err = net.Listen("tcp", address); err != nil {
			return err
		}
		defer listeners[i].Close()
	}
	site, err := agent.FindSite(ctx, agent.SiteConfig{API: api, Namespace: o.namespace, Pod: o.pod, PodIP: os.Getenv("POD_IP"), Listener: listeners[0], Logger: log})
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(site.Self.Address)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(listeners[1].Addr().String())
	if err != nil {
		return err
	}
	site.Self.Data = net.JoinHostPort(host, port)
	o.training.Job, o.training.Listener = site.Job, listeners[1].(*net.TCPListener)
	o.training.Done = func(r reference.Result) {
		log.Info("trained to the end", "step", r.Step, "samples", r.Samples, "once", r.Once, "hash", fmt.Sprintf("%016x", r.Hash), "accuracy", r.Accuracy)
	}
	trainer, err := reference.New(o.training)
	if err != nil {
		return usageError{errors.New(strings.ReplaceAll(err.Error(), "\n", "; ")), "capstan-trainer ring --help"}
	}
	cfg := site.Config(o.ring, trainer)
	cfg.Stats = trainer.Stats
	a, err := agent.New(cfg)
	if err != nil {
		return usageError{err, "capstan-trainer ring --help"}
	}
	log.Info("working", "ordinal", site.Self.ID.Ordinal, "address", site.Self.Address, "data", site.Self.Data, "stats", listeners[2].Addr().String(), "version", version)

	// What main does with SIGTERM would end the process at once: here it is the order to leave the ring first.
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, syscall.SIGTERM, os.Interrupt)
	defer signal.Stop(terms)
	server := &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer context.AfterFunc(ctx, func() { server.Close() })()
		if err := server.Serve(listeners[2]); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		select {
		case <-ctx.Done():
		case <-terms:
			a.Drain()
		}
		return nil
	})
	group.Go(func() error {
		defer stop()
		exit, err := a.Run(ctx)
		log.Info("left", "reason", exit.Reason, "generation", exit.Generation, "step", exit.Step)
		return err
	})
	return group.Wait()
}
