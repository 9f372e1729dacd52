package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/ring"
)

// options are the flags of a worker.
type options struct {
	ring                ring.Config
	site                agent.SiteConfig
	command             []string
	inPlace, fixed      bool
	listen, statsListen string
	kubeconfig          string
	stop, linger        time.Duration
	termination         string
}

func workerCommand(stdout, stderr io.Writer) *cobra.Command {
	var o options
	var level, format string
	c := &cobra.Command{
		Use:   "capstan-agent [flags] -- COMMAND [ARGUMENT...]",
		Short: "Runs a training command as one worker of an elastic ring",
		Long: `Runs a training command as one worker of an elastic ring.

It is PID 1 of a StatefulSet's pod, and the workers' agents find each other. When the HPA changes the number of workers, or one is
lost, they agree on a new generation: all stop after the same step, and the command goes on with a new rank and world size. Without
--in-place it is started anew for each generation, so let it read its newest checkpoint when it starts, write one at SIGTERM, and exit
0 when the job is done. With --in-place it lives on: it is told what to do by the socket in $` + agent.SocketEnv + `.

In a pod it needs no flags: it learns from the API server whose worker it is. It takes the rights to get its pod and its StatefulSet, to
list and watch the pods, to get, create, update and watch the Lease and the ConfigMap NAME-ring, and to patch statefulsets/scale; and a
projected serviceAccountToken with the audience capstan.dev/NAMESPACE/STATEFULSET. Where it has none of that, --fixed makes the first
ordinal the coordinator, and --secret-file has a secret that the workers share.

When the job is done it stays up and idle, for a StatefulSet would start it again, and sets the StatefulSet's replicas to 0.`,
		Example: `  capstan-agent -- python train.py
  capstan-agent --min 2 --world-unit 2 --in-place -- python train.py
  capstan-agent --fixed --secret-file /etc/ring/secret -- python train.py
  capstan-agent wait --job ml/training`,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if dash := c.ArgsLenAtDash(); len(args) > 0 && dash != 0 {
				return wrong(fmt.Errorf("%q is no command of the agent's", args[0]), "put -- before the training command: capstan-agent -- "+strings.Join(args, " "))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 && c.Flags().NFlag() == 0 {
				return c.Help()
			}
			log, err := logger(stderr, level, format)
			if err != nil {
				return err
			}
			o.command = args
			return work(c.Context(), o, stdout, stderr, log)
		},
	}
	name, _ := os.Hostname()
	f := c.Flags()
	f.BoolVar(&o.inPlace, "in-place", false, "the command re-rings in place, told by the socket in $"+agent.SocketEnv)
	f.IntVar(&o.ring.Min, "min", 1, "workers below which the ring pauses")
	f.IntVar(&o.ring.WorldUnit, "world-unit", 1, "the world size is a multiple of it")
	f.IntSliceVar(&o.ring.WorldSizes, "world-sizes", nil, "the only world sizes (default: any)")
	f.IntVar(&o.ring.MaxRestarts, "max-restarts", 0, "crashes of the whole job after which it fails (default: any number)")
	f.IntVar(&o.ring.SameCrashes, "same-crashes", 3, "generations in a row that crash at one step with one error, after which the job fails")
	f.DurationVar(&o.ring.ChangeInterval, "change-interval", time.Minute, "least time between two changes that only add workers")
	f.DurationVar(&o.ring.Settle, "settle", 3*time.Second, "how long a generation waits for more workers after the newest one")
	f.DurationVar(&o.ring.RegrowWait, "regrow-wait", 0, "how long the others wait for a lost worker to come back (default: not at all)")
	f.DurationVar(&o.ring.QuiesceTimeout, "quiesce-timeout", 0, "how long a step boundary is waited for (default: 10s, or --stop-timeout and 5s without --in-place)")
	f.DurationVar(&o.ring.SyncTimeout, "sync-timeout", 30*time.Second, "how long opening connections and copying the state may take")
	f.DurationVar(&o.ring.PauseLimit, "pause-limit", 0, "a pause of so long fails the job (default: none does)")
	f.StringVar(&o.ring.Version, "code-version", os.Getenv("CAPSTAN_CODE_VERSION"), "two versions are never in one ring (default: the revision of the pod's template)")
	f.StringVar(&o.listen, "listen", ":29400", "address for the other agents")
	f.StringVar(&o.statsListen, "stats-listen", ":9402", "address of /metrics, /status and /healthz")
	f.DurationVar(&o.site.Grace, "grace", 0, "terminationGracePeriodSeconds of the pod (default: as the pod says; 30s with --fixed)")
	f.DurationVar(&o.stop, "stop-timeout", 0, "how long the command has after SIGTERM (default: the grace less 15s)")
	f.DurationVar(&o.linger, "linger", 0, "exit so long after the job's end, where nothing starts the agent again (default: stay)")
	f.BoolVar(&o.fixed, "fixed", false, "use no API server: the first ordinal coordinates, and nothing is recorded")
	f.IntVar(&o.site.FirstOrdinal, "first-ordinal", 0, "with --fixed: the StatefulSet's .spec.ordinals.start")
	f.StringVar(&o.site.Service, "service", "", "with --fixed: the headless Service (default: the StatefulSet's name)")
	f.StringVar(&o.site.Coordinator, "coordinator", "", "with --fixed: host:port of the first ordinal's agent (default: by the Service)")
	f.StringVar(&o.site.SecretFile, "secret-file", "", "file with a secret that the workers share (default: tokens)")
	f.StringVar(&o.site.TokenFile, "token-file", agent.DefaultTokenFile, "file with a projected serviceAccountToken")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file (default: in-cluster)")
	f.StringVar(&o.site.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the pod (default: $POD_NAMESPACE, or the ServiceAccount's)")
	f.StringVar(&o.site.Pod, "pod", cmp.Or(os.Getenv("POD_NAME"), name), "name of the pod (default: $POD_NAME, or the host's)")
	f.StringVar(&o.site.PodUID, "pod-uid", os.Getenv("POD_UID"), "with --fixed: UID of the pod (default: $POD_UID, or its name)")
	f.StringVar(&o.site.PodIP, "pod-ip", os.Getenv("POD_IP"), "address that the others reach this pod by (default: $POD_IP, or the pod's)")
	f.StringVar(&o.termination, "termination-log", "/dev/termination-log", "file that gets the last words for the pod's status, if it is there")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&format, "log-format", "text", "text or json")
	return c
}

// child is a trainer that signals can be passed on to.
type child interface {
	agent.Trainer
	Signal(syscall.Signal)
}

// work runs a worker until it has left.
func work(ctx context.Context, o options, stdout, stderr io.Writer, log *slog.Logger) error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return wrong(err, "--listen names another address")
	}
	defer listener.Close()
	o.site.Listener, o.site.Logger = listener, log
	if !o.fixed {
		api, namespace, err := connect(o.kubeconfig)
		if err != nil {
			return wrong(err, "in a pod it needs a ServiceAccount; without an API server use --fixed")
		}
		o.site.API, o.site.Namespace = api, cmp.Or(o.site.Namespace, namespace)
	}
	finding, found := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	site, err := agent.FindSite(finding, o.site)
	found()
	if err != nil {
		return err
	}
	if o.stop == 0 {
		o.stop = max(5*time.Second, site.Grace-15*time.Second)
	}
	if o.ring.QuiesceTimeout == 0 && !o.inPlace { // its boundary is the command's end
		o.ring.QuiesceTimeout = o.stop + 5*time.Second
	}
	reaper, err := agent.NewReaper()
	if err != nil {
		return err
	}
	trainer, err := o.trainer(site.Job, reaper, stdout, stderr, log)
	if err != nil {
		return wrong(err, "capstan-agent --help shows examples")
	}
	cfg := site.Config(o.ring, trainer)
	cfg.Linger, cfg.StopTimeout = o.linger, o.stop+15*time.Second
	a, err := agent.New(cfg)
	if err != nil {
		return wrong(err, "change the flag, or leave it out")
	}
	page, err := net.Listen("tcp", o.statsListen)
	if err != nil {
		return wrong(err, "--stats-listen names another address")
	}
	server := &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	log.Info("working", "ordinal", site.Self.ID.Ordinal, "address", site.Self.Address, "stats", page.Addr().String(), "grace", site.Grace, "version", version)

	var exit ring.Exit
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return reaper.Run(ctx) })
	all.Go(func() error {
		defer context.AfterFunc(ctx, func() { server.Close() })()
		if err := server.Serve(page); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", o.statsListen, err)
		}
		return nil
	})
	all.Go(func() error {
		for {
			select {
			case s := <-signals:
				switch s := s.(syscall.Signal); s {
				case syscall.SIGTERM, syscall.SIGINT:
					a.Drain()
				default:
					trainer.Signal(s)
				}
			case <-ctx.Done():
				return nil
			}
		}
	})
	all.Go(func() (err error) {
		defer stop()
		exit, err = a.Run(ctx)
		return err
	})
	if err := all.Wait(); err != nil {
		lastWords(o.termination, map[string]any{"reason": "ERROR", "error": err.Error()})
		return err
	}
	s := a.Status()
	log.Info("left", "reason", exit.Reason, "generation", exit.Generation, "step", exit.Step)
	lastWords(o.termination, map[string]any{"reason": "LEFT", "why": exit.Reason, "generation": exit.Generation.String(), "step": exit.Step})
	if o.linger > 0 && s.End == string(ring.Failed) {
		return ended(1, fmt.Errorf("the job has failed: %s", s.Why), "")
	}
	return nil
}

// lastWords go where kubectl describe shows them. A worker that left is neither a success nor a failure of its job.
func lastWords(file string, words map[string]any) {
	if _, err := os.Stat(file); err != nil {
		return
	}
	data, _ := json.Marshal(words)
	os.WriteFile(file, data, 0o644)
}

func (o options) trainer(job string, reaper *agent.Reaper, stdout, stderr io.Writer, log *slog.Logger) (child, error) {
	cfg := agent.ProcessConfig{
		Command: o.command, Environment: func(e agent.Entry) ([]string, error) { return environment(job, e), nil },
		Reaper: reaper, Stdout: stdout, Stderr: stderr, Logger: log, StopTimeout: o.stop,
	}
	if !o.inPlace {
		return agent.NewProcess(cfg)
	}
	dir, err := os.MkdirTemp("", "capstan-agent-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for sockets: %w", err)
	}
	return agent.NewInPlace(cfg, dir)
}
