// Demo shows Capstan at work on a real Kubernetes: the article's HorizontalPodAutoscaler takes a training job from two workers
// to more and back, on the value that the exporter measured and the adapter served. GPUs are simulated at the boundary of the
// NVIDIA library; everything else is real. It ends with a summary, and non-zero if the HPA did not go up and come back.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/capstan-gpu/capstan/test/rig"
)

const namespace = "training"

type options struct {
	kubeconfig, registry string
	keep                 bool
	base, rush           float64
	limit                time.Duration
}

func main() {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // client-go's own log would tear the table
	var o options
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch a real HPA resize a training job on simulated GPUs",
		Long: `Demo starts a real two-node Kubernetes on this machine (or uses the one you name), installs Capstan with simulated
GPUs and a training job, trebles the job's load and takes it back, and prints what happens, one line per change.`,
		Example: `  make demo
  make demo KEEP=1                                         leave the cluster running afterwards
  make demo KUBECONFIG=$HOME/.kube/config REGISTRY=registry.example.com/me   use a cluster of your own`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "use this cluster instead of starting one")
	f.StringVar(&o.registry, "registry", "", "with --kubeconfig: push the images there, and take them from there")
	f.BoolVar(&o.keep, "keep", false, "leave everything running, and say what to type next")
	f.Float64Var(&o.base, "rate", 100, "samples/s that the stream offers at first; a worker can do 100")
	f.Float64Var(&o.rush, "rush", 300, "samples/s that the stream offers in the rush")
	f.DurationVar(&o.limit, "limit", 0, "the longest that one act of the story may take (default 3m, or 15m with --kubeconfig)")

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	began := time.Now()
	say := func(format string, args ...any) {
		fmt.Printf("[%4.0fs] %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	own := o.kubeconfig == ""
	if o.limit == 0 {
		o.limit = 3 * time.Minute
		if !own {
			o.limit = 15 * time.Minute
		}
	}
	if !own && o.registry == "" {
		return errors.New("--kubeconfig needs --registry: the nodes of your cluster must be able to pull the images\n  try: make demo KUBECONFIG=… REGISTRY=registry.example.com/you")
	}

	var (
		cluster  *rig.Cluster
		settings string // of the HPA controller
	)
	if own {
		say("a Kubernetes of two nodes on this machine (the first time it is built, which takes minutes)")
		local, err := rig.Up(ctx, os.Stdout)
		if err != nil {
			return err
		}
		if !o.keep {
			defer func() {
				say("taking the cluster down")
				if e := rig.Down(context.WithoutCancel(ctx)); err == nil {
					err = e
				}
			}()
		}
		say("building the images and loading them into the nodes")
		if err := rig.LoadImages(ctx, os.Stdout); err != nil {
			return err
		}
		cluster, settings = local.Cluster, local.HPASettings()
	} else {
		say("pushing the images to %s", o.registry)
		if err := rig.PushImages(ctx, o.registry, os.Stdout); err != nil {
			return err
		}
		if cluster, err = rig.Open(o.kubeconfig, ""); err != nil {
			return err
		}
		cluster.Registry = o.registry
		settings = "the HPA controller's settings are your cluster's own; with the defaults (sync 15s, down after 5m) this takes about 12 minutes"
		say("%s", settings)
		if !o.keep {
			defer func() { cleanUp(context.WithoutCancel(ctx), cluster, say) }()
		}
	}

	if err := cluster.Install(ctx, "deploy/overlays/simulated", func(what string) { say("%s", what) }); err != nil {
		return err
	}
	say("starting the training job and the article's HPA in namespace %s", namespace)
	if err := cluster.ApplyOverlay(ctx, "deploy/examples/mnist-training"); err != nil {
		return err
	}
	err = rig.Until(ctx, 2*time.Minute, "the HPA's two first workers are ready", func(ctx context.Context) (bool, string, error) {
		n, err := look(ctx, cluster, began)
		if err != nil {
			return false, err.Error(), nil
		}
		return n.Workers >= 2, fmt.Sprintf("%d ready", n.Workers), nil
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, cluster.Describe(ctx, namespace))
	}

	story := &Story{Plan: Plan{BaseRate: o.base, RushRate: o.rush, Min: 2, Settle: 10 * time.Second, Limit: o.limit}}
	sights, err := play(ctx, cluster, story, say)
	if err != nil {
		return err
	}
	if err := summarize(ctx, os.Stdout, cluster, story, sights, settings); err != nil {
		return err
	}
	if o.keep {
		fmt.Printf("\nThe cluster is still running. Next you could type:\n"+
			"  export KUBECONFIG=%s\n  kubectl -n %s get hpa,pods\n"+
			"  kubectl get --raw /apis/external.metrics.k8s.io/v1beta1/namespaces/%s/%s\n", cluster.Kubeconfig, namespace, namespace, rig.Metric)
		if own {
			fmt.Println("  go run ./test/cluster down")
		}
	}
	if story.Act == Failed {
		return fmt.Errorf("the story failed: %s\n%s", story.Why, cluster.Describe(ctx, namespace))
	}
	return nil
}

// play steps the story with what it sees, once a second, until its end.
func play(ctx context.Context, cluster *rig.Cluster, story *Story, say func(string, ...any)) (sights []Sight, err error) {
	fmt.Printf("\n%s\n", Header)
	began, rate, act := time.Now(), 0.0, Act(-1)
	var printed Sight
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for misses := 0; story.Act < Done; {
		select {
		case <-ctx.Done():
			return sights, context.Cause(ctx)
		case <-tick.C:
		}
		now, err := look(ctx, cluster, began)
		if err != nil {
			if misses++; misses == 20 {
				return sights, err
			}
			continue
		}
		misses = 0
		if len(sights) == 0 || now.Changed(printed) {
			fmt.Println(now.Line())
			printed = now
		}
		sights = append(sights, now)
		want := story.Step(now)
		if story.Act != act {
			act = story.Act
			fmt.Printf("  -- %s\n", act)
		}
		if want != rate {
			if err := cluster.SetRate(ctx, namespace, want); err != nil {
				return sights, err
			}
			rate = want
		}
	}
	return sights, nil
}

// cleanUp takes out of somebody's cluster what the demonstration put in.
func cleanUp(ctx context.Context, cluster *rig.Cluster, say func(string, ...any)) {
	say("removing the demonstration from the cluster")
	for _, folder := range []string{"deploy/examples/mnist-training", "deploy/overlays/simulated"} {
		if _, err := cluster.Kubectl(ctx, "delete", "--ignore-not-found", "--wait=false", "-k", cluster.Path(folder)); err != nil {
			say("%v", err)
		}
	}
}
