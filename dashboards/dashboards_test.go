package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/grafana/grafana-foundation-sdk/go/dashboard"

	"github.com/capstan-gpu/capstan/dashboards/board"
	"github.com/capstan-gpu/capstan/dashboards/check"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestFilesAreUpToDate(t *testing.T) {
	if err := run(".", !*update); err != nil {
		t.Error(err)
	}
}

// Grafana's own strict schema: no unknown and no missing field.
func TestStrictSchema(t *testing.T) {
	files, err := filepath.Glob("*.json")
	if err != nil || len(files) != len(board.Names()) {
		t.Fatalf("%v, %v; want a file for each of %v", files, err, board.Names())
	}
	var first []byte
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first = raw
		if _, err := check.Parse(raw); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	for _, bad := range []string{`{"title":"x","schemaVersion":42,"panelz":[]}`, strings.Replace(string(first), `"noValue"`, `"noValues"`, 1)} {
		if _, err := check.Parse([]byte(bad)); err == nil {
			t.Errorf("the strict schema takes a field that does not exist: %.80s", bad)
		}
	}
}

func TestForm(t *testing.T) {
	for _, name := range board.Names() {
		d, err := board.Build(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, problem := range check.Form(d) {
			t.Errorf("%s: %s", name, problem)
		}
	}
}

// Every family that a dashboard asks for is one that the exporter or the adapter serves, or a named one of kube-state-metrics.
func TestMetricsExist(t *testing.T) {
	known := []string{board.HPADesired, board.HPACurrent, board.SetReplicas, board.SetReady, "kube_horizontalpodautoscaler_info"}
	for _, file := range []string{"../exporter/testdata/golden/metrics.prom", "../adapter/metrics.go"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		known = append(known, regexp.MustCompile(`capstan_[a-z_]+`).FindAllString(string(data), -1)...)
	}
	for _, name := range board.Names() {
		d, err := board.Build(name)
		if err != nil {
			t.Fatal(err)
		}
		names, err := check.Metrics(d)
		if err != nil || len(names) < 5 {
			t.Fatalf("%v, %v", names, err)
		}
		for _, n := range names {
			if !slices.Contains(known, n) {
				t.Errorf("%s asks for %s, which nobody serves", name, n)
			}
		}
	}
}

// pages are what two workers' exporters, the adapter and kube-state-metrics expose over some minutes.
func pages(start time.Time) (all []check.Page) {
	for i := range 60 {
		seconds := float64(5 * i)
		var b strings.Builder
		for pod, share := range map[string]float64{"web-0": 0.9, "web-1": 0.7} {
			labels := fmt.Sprintf(`{namespace="training",pod=%q,pod_uid="uid-%s"`, pod, pod)
			fmt.Fprintf(&b, "capstan_pod_gpu_busy_seconds_total%s,shared=\"false\"} %g\n", labels, share*seconds)
			fmt.Fprintf(&b, "capstan_pod_gpu_observed_seconds_total%s,shared=\"false\"} %g\n", labels, seconds)
			fmt.Fprintf(&b, "capstan_pod_gpu_memory_used_bytes%s,shared=\"false\"} 1e9\ncapstan_pod_gpus%s} 1\n", labels, labels)
			fmt.Fprintf(&b, "capstan_training_samples_total%s} %g\n", labels, 100*seconds)
		}
		job := `metric="gpu_utilization",namespace="training",workload="web"`
		fmt.Fprintf(&b, "capstan_adapter_workload_signal{%s} 1\ncapstan_adapter_workload_sample_age_seconds{%s} 2\n", job, job)
		for _, state := range []string{"ready", "reporting", "held"} {
			fmt.Fprintf(&b, "capstan_adapter_workload_pods{%s,state=%q} 2\n", job, state)
		}
		b.WriteString(`kube_horizontalpodautoscaler_status_desired_replicas{namespace="training",horizontalpodautoscaler="h"} 2
kube_horizontalpodautoscaler_info{namespace="training",horizontalpodautoscaler="h",scaletargetref_name="web"} 1
kube_statefulset_replicas{namespace="training",statefulset="web"} 2
kube_statefulset_status_replicas_ready{namespace="training",statefulset="web"} 2
`)
		all = append(all, check.Page{At: start.Add(time.Duration(seconds) * time.Second), Text: "# TYPE x untyped\n" + b.String()})
	}
	return all
}

func TestQueries(t *testing.T) {
	start := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	samples, err := check.Samples(pages(start))
	if err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{"namespace": "training", "workload": "web"}
	evaluate := func(d dashboard.Dashboard) []string {
		return check.Evaluate(t.Context(), d, samples, start.Add(time.Minute), start.Add(4*time.Minute), variables)
	}
	for _, name := range board.Names() {
		d, err := board.Build(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, problem := range evaluate(d) {
			t.Errorf("%s: %s", name, problem)
		}
		// The check can fail: a family that nobody serves, and an expression that is none.
		raw, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		for from, to := range map[string]string{"capstan_pod_gpus": "capstan_pod_cpus", "100 * sum by (pod)": "100 * sum by pod", "100 * sum(": "1000 * sum("} {
			broken, err := check.Parse([]byte(strings.ReplaceAll(string(raw), from, to)))
			if err != nil {
				t.Fatal(err)
			}
			if len(evaluate(broken)) == 0 {
				t.Errorf("%s with %q for %q has no problem", name, to, from)
			}
		}
	}
}
