// Package prometheus holds the rules for a Prometheus, and these tests of them: each alert fires in a story in which it should, and
// in the same story with the fault taken out it does not.
package prometheus

import (
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/adapter/store"
)

func load(t *testing.T) *rulefmt.RuleGroups {
	t.Helper()
	data, err := os.ReadFile("capstan.yaml")
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.Parse(data, false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	if groups == nil {
		t.FailNow()
	}
	return groups
}

func rule(t *testing.T, name string) rulefmt.Rule {
	t.Helper()
	for _, g := range load(t).Groups {
		for _, r := range g.Rules {
			if r.Alert == name || r.Record == name {
				return r
			}
		}
	}
	t.Fatalf("there is no rule %s", name)
	return rulefmt.Rule{}
}

var engine = promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: 10 * time.Second, LookbackDelta: time.Minute, Parser: parser.NewParser(parser.Options{})})

// vector evaluates an expression on series in promtool's notation, a value every 15 s, at a time after their start.
func vector(t *testing.T, series, expr string, at time.Duration) promql.Vector {
	t.Helper()
	samples := store.New(store.Config{Retention: 24 * time.Hour})
	for line := range strings.Lines(series) {
		metric, values, err := parser.NewParser(parser.Options{}).ParseSeriesDesc(strings.TrimSpace(line))
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		for i, v := range values {
			if !v.Omitted {
				samples.Append([]store.Sample{{Labels: metric, Value: v.Value, At: time.Unix(int64(15*i), 0)}})
			}
		}
	}
	query, err := engine.NewInstantQuery(t.Context(), samples, nil, expr, time.Unix(0, 0).Add(at))
	if err != nil {
		t.Fatal(err)
	}
	defer query.Close()
	result := query.Exec(t.Context())
	if result.Err != nil {
		t.Fatal(result.Err)
	}
	v, err := result.Vector()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// firing says which label sets of an alert fire at a time: those for which its expression has held for its `for`.
func firing(t *testing.T, r rulefmt.Rule, series string, at time.Duration) (labels []string) {
	t.Helper()
	for _, s := range vector(t, series, r.Expr, at) {
		held := true
		for back := time.Duration(0); back <= time.Duration(r.For); back += 15 * time.Second {
			held = held && slices.ContainsFunc(vector(t, series, r.Expr, at-back), func(o promql.Sample) bool { return o.Metric.String() == s.Metric.String() })
		}
		if held {
			labels = append(labels, s.Metric.String())
		}
	}
	return labels
}

func TestAlerts(t *testing.T) {
	const (
		hpa     = `kube_horizontalpodautoscaler_status_condition{namespace="n", horizontalpodautoscaler="h", condition="ScalingActive", status="false"} `
		asks    = "\n  kube_horizontalpodautoscaler_spec_target_metric{namespace=\"n\", horizontalpodautoscaler=\"h\", metric_name=\"gpu_utilization\"} 80x60"
		foreign = "\n  kube_horizontalpodautoscaler_spec_target_metric{namespace=\"n\", horizontalpodautoscaler=\"h\", metric_name=\"queue_length\"} 80x60"
		signal  = `capstan_adapter_workload_signal{namespace="n", workload="web", metric="gpu_utilization"} `
	)
	for _, c := range []struct {
		alert, story, series string
		at                   time.Duration
		want                 []string
	}{
		{"CapstanHPAStarvedOfData", "the adapter answers with an error for long", signal + "1x4 0x56", 8 * time.Minute, []string{`{namespace="n", workload="web"}`}},
		{"CapstanHPAStarvedOfData", "not for long enough", signal + "1x12 0x48", 8 * time.Minute, nil},
		{"CapstanHPAStarvedOfData", "it answers with values", signal + "1x60", 8 * time.Minute, nil},
		{"CapstanHPAStarvedOfData", "the HPA says so itself, and there is no adapter", hpa + "1x60" + asks, 8 * time.Minute, []string{`{horizontalpodautoscaler="h", namespace="n"}`}},
		{"CapstanHPAStarvedOfData", "the HPA is content", hpa + "0x60" + asks, 8 * time.Minute, nil},
		{"CapstanHPAStarvedOfData", "another product's metric is missing", hpa + "1x60" + foreign, 8 * time.Minute, nil},
		{"CapstanGPULost", "a GPU does not answer", `capstan_gpu_up{uuid="GPU-a"} 1x4 0x30`, 3 * time.Minute, []string{`{__name__="capstan_gpu_up", uuid="GPU-a"}`}},
		{"CapstanGPULost", "only for a moment", `capstan_gpu_up{uuid="GPU-a"} 1x4 0x2 1x30`, 3 * time.Minute, nil},
		{"CapstanGPULost", "all is well", `capstan_gpu_up{uuid="GPU-a"} 1x40`, 3 * time.Minute, nil},
	} {
		if got := firing(t, rule(t, c.alert), "  "+c.series, c.at); !slices.Equal(got, c.want) {
			t.Errorf("%s, %s: fires for %v, want %v", c.alert, c.story, got, c.want)
		}
	}
}

func TestRecording(t *testing.T) {
	series := `  capstan_pod_gpu_busy_seconds_total{namespace="n", pod="web-0", pod_uid="u", shared="false"} 0+12x20
  capstan_pod_gpu_observed_seconds_total{namespace="n", pod="web-0", pod_uid="u", shared="false"} 0+15x20`
	got := vector(t, series, rule(t, "namespace_pod:capstan_gpu_utilization:ratio_rate1m").Expr, 3*time.Minute)
	if len(got) != 1 || got[0].F < 0.799 || got[0].F > 0.801 {
		t.Errorf("%v, want 0.8", got)
	}
}

// Every alert says what is wrong, what to do, and where that is written.
func TestAlertsAreExplained(t *testing.T) {
	page, err := os.ReadFile("../../docs/alerts.md")
	if err != nil {
		t.Fatal(err)
	}
	alerts := 0
	for _, g := range load(t).Groups {
		for _, r := range g.Rules {
			if r.Alert == "" {
				continue
			}
			alerts++
			for _, a := range []string{"summary", "description", "runbook_url"} {
				if r.Annotations[a] == "" {
					t.Errorf("%s has no %s", r.Alert, a)
				}
			}
			if r.Labels["severity"] == "" || r.For == 0 || r.KeepFiringFor == 0 {
				t.Errorf("%s lacks severity, for or keep_firing_for", r.Alert)
			}
			if !regexp.MustCompile(`(?m)^## `+r.Alert+`$`).Match(page) || !strings.HasSuffix(r.Annotations["runbook_url"], "docs/alerts.md#"+strings.ToLower(r.Alert)) {
				t.Errorf("docs/alerts.md has no heading for %s, or its runbook_url leads elsewhere", r.Alert)
			}
		}
	}
	if alerts < 2 {
		t.Error(fmt.Sprint("only ", alerts, " alerts"))
	}
}
