package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Local is the test cluster on this machine, which test/cluster starts and stops.
type Local struct {
	*Cluster
	Status Status
}

// Status is what `go run ./test/cluster status -o json` prints, as far as it is used here.
type Status struct {
	Running    bool              `json:"running"`
	Kubeconfig string            `json:"kubeconfig"`
	Kubectl    string            `json:"kubectl"`
	Logs       string            `json:"logs"`
	AuditLog   string            `json:"auditLog"`
	HPA        map[string]string `json:"hpa"`
}

// HPASettings names the HPA controller's flags in one line.
func (l *Local) HPASettings() string {
	return fmt.Sprintf("sync every %s, down after %s, tolerance 10 %% (test cluster; Kubernetes' defaults are 15s and 5m)",
		l.Status.HPA["syncPeriod"], l.Status.HPA["downscaleStabilization"])
}

// Up starts the test cluster, or finds it running, and connects to it. Progress goes to w.
func Up(ctx context.Context, w io.Writer, args ...string) (*Local, error) {
	if err := program(ctx, w, "./test/cluster", append([]string{"up"}, args...)...); err != nil {
		return nil, err
	}
	return Running(ctx)
}

// Running connects to the test cluster that runs on this machine.
func Running(ctx context.Context) (*Local, error) {
	var out bytes.Buffer
	if err := program(ctx, &out, "./test/cluster", "status", "-o", "json"); err != nil {
		return nil, err
	}
	l := &Local{}
	if err := json.Unmarshal(out.Bytes(), &l.Status); err != nil {
		return nil, fmt.Errorf("decode the cluster's status %q: %w", out.String(), err)
	}
	if !l.Status.Running {
		return nil, fmt.Errorf("the test cluster does not run; start it: go run ./test/cluster up")
	}
	var err error
	l.Cluster, err = Open(l.Status.Kubeconfig, l.Status.Kubectl)
	return l, err
}

// Down ends the test cluster and removes what it left.
func Down(ctx context.Context) error { return program(ctx, io.Discard, "./test/cluster", "down") }

// Node powers a node of the test cluster off ("stop") or on ("start").
func (l *Local) Node(ctx context.Context, action, name string) error {
	return program(ctx, io.Discard, "./test/cluster", "node", action, name)
}

// LoadImages builds the images and loads them into every node of the test cluster.
func LoadImages(ctx context.Context, w io.Writer) error {
	dir, err := os.MkdirTemp("", "capstan-images-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := program(ctx, w, "./images", "build", "--out", dir); err != nil {
		return err
	}
	tars, err := filepath.Glob(filepath.Join(dir, "*.tar"))
	if err != nil || len(tars) == 0 {
		return fmt.Errorf("build the images: no tar in %s", dir)
	}
	return program(ctx, w, "./test/cluster", append([]string{"load"}, tars...)...)
}

// PushImages builds the images and pushes them to a registry.
func PushImages(ctx context.Context, registry string, w io.Writer) error {
	return program(ctx, w, "./images", "push", registry)
}

// program runs a Go program of this repository in its root. Its output goes to w, and into the error when it fails.
func program(ctx context.Context, w io.Writer, pkg string, args ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"run", pkg}, args...)...)
	cmd.Dir = root
	var errs bytes.Buffer
	cmd.Stdout = w
	cmd.Stderr = &errs
	if w == io.Writer(os.Stdout) {
		cmd.Stderr = io.MultiWriter(os.Stderr, &errs)
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go run %s %s: %w\n%s", pkg, strings.Join(args, " "), err, tail(errs.String(), 20))
	}
	return nil
}
