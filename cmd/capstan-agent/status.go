package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

func statusCommand(stdout io.Writer) *cobra.Command {
	var t target
	var address string
	const example = "capstan-agent status --job ml/training"
	c := &cobra.Command{
		Use:   "status",
		Short: "Say how a job is, or how the worker of this pod is",
		Long: `Say how a job is; or, without --job, how the worker of this pod is, in its own words:
  kubectl exec training-0 -- capstan-agent status`,
		Example: "  " + example + "\n  capstan-agent status -o json",
		Args:    none,
		RunE: func(c *cobra.Command, _ []string) error {
			if t.job != "" {
				client, err := t.find(example)
				if err != nil {
					return err
				}
				s, err := readJob(c.Context(), client, t.job)
				if err != nil {
					return err
				}
				return show(stdout, t.output, s)
			}
			if t.output != "text" && t.output != "json" {
				return wrong(fmt.Errorf("--output is %q", t.output), "use text or json")
			}
			s, err := readWorker(c.Context(), address)
			if err != nil {
				return ended(1, err, "--address names the stats page of a worker, --job a job")
			}
			return show(stdout, t.output, s)
		},
	}
	t.flags(c, true)
	c.Flags().StringVar(&address, "address", "http://localhost:9402", "address of the worker's stats page")
	return c
}

// workerStatus is how a worker is, for people.
type workerStatus struct{ agent.Status }

func readWorker(ctx context.Context, address string) (s workerStatus, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(address, "/")+"/status", nil)
	if err != nil {
		return s, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return s, fmt.Errorf("read the worker's status: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return s, fmt.Errorf("read the worker's status: %s", response.Status)
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&s.Status); err != nil {
		return s, fmt.Errorf("read the worker's status: %w", err)
	}
	return s, nil
}

func (s workerStatus) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "worker %d: %s", s.Ordinal, s.Phase)
	if s.Generation != "" {
		fmt.Fprintf(&b, ", generation %s", s.Generation)
	}
	if s.Rank >= 0 {
		fmt.Fprintf(&b, ", rank %d of %d", s.Rank, s.World)
	}
	if s.Step >= 0 {
		fmt.Fprintf(&b, ", step %d", s.Step)
	}
	if s.Why != "" {
		fmt.Fprintf(&b, "\n  why: %s", s.Why)
	}
	if s.Coordinator >= 0 {
		fmt.Fprintf(&b, "\n  coordinator: worker %d", s.Coordinator)
	} else {
		b.WriteString("\n  coordinator: not known")
	}
	if r := s.Ring; r != nil {
		fmt.Fprintf(&b, ", term %d\n  members: %v", r.Term, r.Members)
		if r.Desired >= 0 {
			fmt.Fprintf(&b, ", %d desired", r.Desired)
		}
		if len(r.Standby) > 0 {
			fmt.Fprintf(&b, ", standing by: %v", r.Standby)
		}
		for _, ordinal := range slices.Sorted(maps.Keys(r.Waiting)) {
			fmt.Fprintf(&b, "\n  worker %d does not run: %s", ordinal, cmp.Or(r.Waiting[ordinal], "not started"))
		}
		if r.Paused != "" {
			fmt.Fprintf(&b, "\n  paused: %s", r.Paused)
		}
		if r.Restarts > 0 {
			fmt.Fprintf(&b, "\n  %d restarts, the last one: %s", r.Restarts, cmp.Or(r.Crash, "not known"))
		}
	}
	return b.String()
}
func show(w io.Writer, output string, v fmt.Stringer) error {
	if output != "json" {
		_, err := fmt.Fprintln(w, v)
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
