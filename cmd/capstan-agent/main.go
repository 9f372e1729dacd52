// Capstan-agent runs a training command as one worker of an elastic ring, and says how such a job is.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

var version = "dev" // set by the linker

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// coded is an error with an exit code of its own. An [agent.Hint] without one is a command that was used wrongly, or set up so.
type coded struct {
	agent.Hint
	code int
}

// wrong is a command that was used wrongly.
func wrong(err error, fix string) error { return agent.Hint{Err: err, Fix: fix} }

// ended is an error with an exit code.
func ended(code int, err error, fix string) error { return coded{agent.Hint{Err: err, Fix: fix}, code} }

// run is main with its surroundings as arguments. It returns 0; 1 for trouble while running, or a job that failed; 2 for a wrong command
// line, or for what cannot be known.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := command(stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code, hint := 1, "the log says what came before; --log-level debug says more"
	if c, ok := errors.AsType[coded](err); ok {
		code, hint = c.code, c.Fix
	} else if h, ok := errors.AsType[agent.Hint](err); ok {
		code, hint = 2, h.Fix
	}
	fmt.Fprintf(stderr, "capstan-agent: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	if hint != "" {
		fmt.Fprintf(stderr, "hint: %s\n", hint)
	}
	return code
}

func command(stdout, stderr io.Writer) *cobra.Command {
	root := workerCommand(stdout, stderr)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return wrong(err, fmt.Sprintf("%s --help lists the flags; the training command comes after --", c.CommandPath()))
	})
	root.AddCommand(waitCommand(stdout, stderr), statusCommand(stdout), resetCommand(stdout))
	return root
}

func none(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return wrong(fmt.Errorf("unexpected argument %q", args[0]), c.CommandPath()+" takes only flags")
	}
	return nil
}

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, wrong(fmt.Errorf("--log-level is %q", level), "use debug, info, warn or error")
	}
	options := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, wrong(fmt.Errorf("--log-format is %q", format), "use text or json")
}
