package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

func waitCommand(stdout, stderr io.Writer) *cobra.Command {
	var t target
	var timeout, interval time.Duration
	const example = "capstan-agent wait --job ml/training"
	c := &cobra.Command{
		Use:   "wait",
		Short: "Wait for the end of a job: exit 0 if it has succeeded, 1 if it has failed, 2 if that is not to be known",
		Long: `Wait for the end of a job, and say how it goes. It exits 0 if the job has succeeded, 1 if it has failed, and 2 if the StatefulSet is
not there, --timeout is over, or the command line is wrong. It takes the rights to get the StatefulSet and the ConfigMap NAME-ring.

The same for kubectl, which does not notice a failure:
  kubectl wait --for=jsonpath='{.data.phase}'=Succeeded --timeout=24h configmap/NAME-ring`,
		Example: "  " + example + "\n  capstan-agent wait --job ml/training --timeout 24h -o json",
		Args:    none,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := t.find(example)
			if err != nil {
				return err
			}
			return wait(c.Context(), client, t, timeout, interval, stdout, stderr)
		},
	}
	t.flags(c, true)
	c.Flags().DurationVar(&timeout, "timeout", 0, "give up after that (default: never)")
	c.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two looks")
	return c
}

// wait says how a job goes on stderr, and how it ended on stdout.
func wait(ctx context.Context, client *agent.Client, t target, timeout, interval time.Duration, stdout, stderr io.Writer) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	said := ""
	say := func(line string) {
		if line != said {
			said = line
			fmt.Fprintln(stderr, line)
		}
	}
	for {
		s, err := readJob(ctx, client, t.job)
		switch {
		case ctx.Err() != nil:
			return ended(2, fmt.Errorf("%s has not ended within %s; last seen: %s", t.job, timeout, cmp.Or(said, "nothing")), "raise --timeout")
		case errors.Is(err, agent.ErrNotFound):
			return ended(2, err, "--job names the StatefulSet of the workers")
		case permanent(err):
			return ended(2, err, "capstan-agent wait --help names the rights that it takes")
		case err != nil:
			say(fmt.Sprintf("%s: cannot be read; trying again: %v", t.job, err))
		case s.Phase == agent.PhaseSucceeded || s.Phase == agent.PhaseFailed:
			if err := show(stdout, t.output, s); err != nil {
				return err
			}
			if s.Phase == agent.PhaseFailed {
				return ended(1, fmt.Errorf("%s has failed: %s", t.job, s.Reason), "capstan-agent reset --job "+t.job+" lets it run again")
			}
			return nil
		default:
			say(s.String())
		}
		select {
		case <-time.After(interval):
		case <-ctx.Done():
		}
	}
}

func resetCommand(stdout io.Writer) *cobra.Command {
	var t target
	replicas := -1
	const example = "capstan-agent reset --job ml/training --replicas 2"
	c := &cobra.Command{
		Use:   "reset",
		Short: "Let a job that has ended run again",
		Long: `Let a job that has ended run again: forget how it ended, and with --replicas set the StatefulSet's replicas. Checkpoints are not
touched: what the workers find there they go on from. A job that has not ended is left alone.

It takes the rights to get the StatefulSet, to get and delete the ConfigMap NAME-ring, and for --replicas to patch statefulsets/scale.`,
		Example: "  " + example,
		Args:    none,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := t.find(example)
			if err != nil {
				return err
			}
			return reset(c.Context(), client, t.job, replicas, stdout)
		},
	}
	t.flags(c, false)
	c.Flags().IntVar(&replicas, "replicas", -1, "set the StatefulSet's replicas (default: leave them)")
	return c
}

func reset(ctx context.Context, client *agent.Client, job string, replicas int, stdout io.Writer) error {
	s, err := readJob(ctx, client, job)
	switch {
	case errors.Is(err, agent.ErrNotFound):
		return wrong(err, "--job names the StatefulSet of the workers")
	case err != nil:
		return err
	case s.Phase != agent.PhaseSucceeded && s.Phase != agent.PhaseFailed:
		return ended(1, fmt.Errorf("it has not ended: %s", s), "scale it to 0 to suspend it; a suspended job goes on where it was")
	case s.Replicas > 0:
		// Workers that know of the end stay idle until their process ends, and its coordinator would scale to 0 again.
		return ended(1, fmt.Errorf("%s still has %d replicas", job, s.Replicas), "its workers scale it to 0; wait for that, or do it")
	}
	if err := client.DeleteRecord(ctx, s.version); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: forgotten that it %s at step %d\n", job, strings.ToLower(s.Phase), s.Step)
	if replicas < 0 {
		return nil
	}
	if err := client.Scale(ctx, replicas); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: %d replicas\n", job, replicas)
	return nil
}
