// Command capstan-exporter measures the GPUs of one node, says which pods hold them and what their trainers report, and
// serves it at /metrics. It decides nothing; see package exporter.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/capstan-gpu/capstan/exporter/gpu"
)

// version is set by the linker.
var version = "development"

func main() { os.Exit(run()) }

// run returns the exit code: 0 asked to end, 1 cannot go on, 2 wrong flags, 3 only a new process can read the GPUs again.
func run() int {
	if err := bindLate(); err != nil {
		fmt.Fprintf(os.Stderr, "capstan-exporter: %v\nhint: leave LD_BIND_NOW out of the environment\n", err)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := command().ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code, hint := 1, "/readyz and the log say more; --once shows what can be read"
	switch {
	case errors.Is(err, gpu.ErrRestart):
		code, hint = 3, "nothing to do in a container: the kubelet starts a new one, which sees the new driver"
	case errors.Is(err, errUsage):
		code, hint = 2, "capstan-exporter --help lists the flags with their bounds"
	case errors.Is(err, syscall.EADDRINUSE):
		hint = "another exporter on this node? --listen takes another address"
	}
	fmt.Fprintf(os.Stderr, "capstan-exporter: %v\nhint: %s\n", err, hint)
	return code
}

// bindLate starts the program anew if it was told to bind every symbol at once: NVML's functions, of which no driver has all, would never
// be found. The loader lets it come so far because these symbols are weak (see images/image.Weaken).
func bindLate() error {
	if os.Getenv("LD_BIND_NOW") == "" {
		return nil
	}
	os.Unsetenv("LD_BIND_NOW")
	program, err := os.Executable()
	if err == nil {
		err = syscall.Exec(program, os.Args, os.Environ())
	}
	return fmt.Errorf("start anew without LD_BIND_NOW: %w", err)
}
