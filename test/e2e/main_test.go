// Package e2e proves on a real Kubernetes what the README promises: real kubelets, the real HPA controller, the real device
// manager; only the GPUs are simulated, behind libnvidia-ml.so.1. One cluster serves all tests, each in a namespace of its own.
package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/capstan-gpu/capstan/test/rig"
)

// cluster is the test cluster with Capstan on it; nil where the tests are skipped.
var cluster *rig.Local

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv("CAPSTAN_E2E") == "" {
		return m.Run() // each test skips, with the reason
	}
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithTimeout(context.Background(), 45*time.Minute)
	defer cancel()
	if err := setUp(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "set up the cluster:", err)
		return 1
	}
	return m.Run()
}

func setUp(ctx context.Context) (err error) {
	if cluster, err = rig.Up(ctx, os.Stderr); err != nil {
		return err
	}
	if err = rig.LoadImages(ctx, os.Stderr); err != nil {
		return err
	}
	return cluster.Install(ctx, "deploy/overlays/simulated", func(what string) { fmt.Fprintln(os.Stderr, what) })
}
