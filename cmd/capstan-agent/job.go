package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/capstan-gpu/capstan/trainer/agent"
)

// connect returns a client of the API server and the namespace that it is for.
func connect(kubeconfig string) (kubernetes.Interface, string, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil)
	cfg, err := loader.ClientConfig()
	if err != nil {
		return nil, "", fmt.Errorf("find the API server: %w", err)
	}
	namespace, _, err := loader.Namespace()
	if err != nil {
		return nil, "", err
	}
	cfg = rest.AddUserAgent(cfg, "capstan-agent")
	cfg.QPS, cfg.Burst = 20, 40
	api, err := kubernetes.NewForConfig(cfg)
	return api, namespace, err
}

// permanent says that it is of no use to ask the API server again.
func permanent(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || errors.Is(err, agent.ErrNoStatefulSet)
}

// jobStatus is how a job is, as its objects say.
type jobStatus struct {
	Job        string `json:"job"` // namespace/name
	Phase      string `json:"phase"`
	Generation string `json:"generation,omitempty"`
	World      int    `json:"world"`    // workers in the ring
	Replicas   int    `json:"replicas"` // that there are to be
	Step       int64  `json:"step"`     // at the beginning of the generation, or at the end of the job
	Reason     string `json:"reason,omitempty"`
	Restarts   int    `json:"restarts"`
	Crash      string `json:"lastCrash,omitempty"`

	version string // of the record's object
}

// phaseWaiting is a job whose workers have not made a ring yet.
const phaseWaiting = "Waiting"

// readJob reads how a job is. The record of a StatefulSet of the same name that was deleted counts as none.
func readJob(ctx context.Context, client *agent.Client, job string) (jobStatus, error) {
	s := jobStatus{Job: job, Phase: phaseWaiting, Replicas: 1}
	set, err := client.StatefulSet(ctx)
	if err != nil {
		return s, err
	}
	if set.Spec.Replicas != nil {
		s.Replicas = int(*set.Spec.Replicas)
	}
	stored, err := client.Record(ctx)
	if errors.Is(err, agent.ErrNotFound) || err == nil && stored.Record.Job != string(set.UID) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	r := stored.Record
	s.version, s.Phase, s.World, s.Step = stored.Version, agent.PhaseOf(r), len(r.Members), r.Step
	s.Reason, s.Restarts, s.Crash = cmp.Or(r.EndReason, string(r.Reason)), r.Restarts, r.Crash.Error
	if !r.Generation.IsZero() {
		s.Generation = r.Generation.String()
	}
	if r.End != "" {
		s.Step = r.EndStep
	}
	return s, nil
}

func (s jobStatus) String() string {
	switch s.Phase {
	case phaseWaiting:
		return fmt.Sprintf("%s: waiting for the first ring; %d replicas", s.Job, s.Replicas)
	case agent.PhaseSucceeded:
		return fmt.Sprintf("%s: succeeded at step %d", s.Job, s.Step)
	case agent.PhaseFailed:
		return fmt.Sprintf("%s: failed at step %d: %s", s.Job, s.Step, s.Reason)
	}
	line := fmt.Sprintf("%s: generation %s, %d of %d workers, from step %d on (%s)", s.Job, s.Generation, s.World, s.Replicas, s.Step, s.Reason)
	if s.Restarts > 0 {
		line += fmt.Sprintf("; %d restarts, the last one: %s", s.Restarts, cmp.Or(s.Crash, "not known"))
	}
	return line
}

// target are the flags that name a job.
type target struct{ job, kubeconfig, output string }

func (t *target) flags(c *cobra.Command, withOutput bool) {
	c.Flags().StringVar(&t.job, "job", "", "NAMESPACE/NAME of the StatefulSet, or NAME")
	c.Flags().StringVar(&t.kubeconfig, "kubeconfig", "", "kubeconfig file (default: as kubectl, or in-cluster)")
	if withOutput {
		c.Flags().StringVarP(&t.output, "output", "o", "text", "text or json")
	}
}

// find returns the client of the job that is meant.
func (t *target) find(example string) (*agent.Client, error) {
	if t.output != "" && t.output != "text" && t.output != "json" {
		return nil, wrong(fmt.Errorf("--output is %q", t.output), "use text or json")
	}
	namespace, name, found := strings.Cut(t.job, "/")
	if !found {
		namespace, name = "", t.job
	}
	if name == "" || strings.Contains(name, "/") {
		return nil, wrong(fmt.Errorf("--job is %q: want NAMESPACE/NAME of a StatefulSet", t.job), example)
	}
	api, usual, err := connect(t.kubeconfig)
	if err != nil {
		return nil, wrong(err, "--kubeconfig names a file; in a pod it needs a ServiceAccount")
	}
	namespace = cmp.Or(namespace, usual)
	t.job = namespace + "/" + name
	return agent.NewClient(api, namespace, name, ""), nil
}
