package exporter

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/capstan-gpu/capstan/exporter/podmap"
)

// dcgm-exporter makes a pod's label "gpu" its own label of that name, and a.b and a_b one label: Prometheus then drops the page.
func TestLabelNames(t *testing.T) {
	names, err := labelNames([]string{"team", "app.kubernetes.io/name", "gpu"})
	if err != nil || strings.Join(names, " ") != "label_team label_app_kubernetes_io_name label_gpu" {
		t.Errorf("%v, %v", names, err)
	}
	for problem, keys := range map[string][]string{
		`"a.b" and "a_b" would both be label_a_b`: {"a.b", "a_b"},
		"label 2 has no name":                     {"a", ""},
		"17 labels: want at most 16":              strings.Split("abcdefghijklmnopq", ""),
	} {
		if _, err := labelNames(keys); err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%v: %v, want %s", keys, err, problem)
		}
	}
}

func TestPodLabels(t *testing.T) {
	s := &Snapshot{
		Held: []podmap.Allocation{held("u1", "g0"), held("u3", "g1")},
		Mapping: podmap.Mapping{Pods: []podmap.Pod{
			{Namespace: "a", Name: "web-0", UID: "u1", Labels: []string{"vision", ""}},
			{Namespace: "a", Name: "web-1", UID: "u2", Labels: []string{"vision", "x"}}, // holds no GPU
			{Namespace: "a", Name: "web-2", UID: "u3"},                                  // has none of them
		}},
	}
	want := `# HELP capstan_pod_labels Labels of a pod that holds a GPU, as they were asked for.
# TYPE capstan_pod_labels gauge
capstan_pod_labels{label_role="",label_team="vision",namespace="a",pod="web-0",pod_uid="u1"} 1
`
	if err := testutil.GatherAndCompare(gatherer{newPodLabels(func() *Snapshot { return s }, []string{"label_team", "label_role"})}, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
