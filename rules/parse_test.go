package rules

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/parser"
)

const head = "apiVersion: capstan.dev/v1alpha1\nkind: Rules\nrules:\n"

const good = head + `- metric: gpu_utilization
  help: How busy.
  unit: percent
  expr: 100 * rate(a[$window]) / rate(b[$window])
  freshness: b
`

func TestParseFillsInDefaults(t *testing.T) {
	list, err := Parse("x.yaml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	want := Rule{Metric: "gpu_utilization", Help: "How busy.", Unit: Percent, Expr: "100 * rate(a[$window]) / rate(b[$window])", Window: time.Minute, Freshness: "b",
		MaxAge: 15 * time.Second, Missing: Hold, HoldFor: 75 * time.Second, JoinFor: 2 * time.Minute, Per: PerPod}
	if len(list) != 1 || list[0] != want {
		t.Errorf("got %+v, want %+v", list, want)
	}
	if q := list[0].Query(); q != "100 * rate(a[60s]) / rate(b[60s])" {
		t.Errorf("query %s", q)
	}
}

// Every error names file, line, field, value, and what would do.
func TestParseSays(t *testing.T) {
	change := func(from, to string) string { return strings.Replace(good, from, to, 1) }
	for want, file := range map[string]string{
		"line 1: the file is empty":                               "",
		"line 1: kind is missing; write kind: Rules":              "apiVersion: capstan.dev/v1alpha1\nrules: []\n",
		`line 1: apiVersion is "v9"; this version reads capstan`:  change("capstan.dev/v1alpha1", "v9"),
		"rules must be a list of at least one rule":               head,
		`line 4: a rule has no field "metrics"; there are metric`: change("metric:", "metrics:"),
		"line 4: metric is missing":                               change("metric: gpu_utilization\n  ", ""),
		`metric is "GPU"; write gpu: the HPA asks in lower case`:  change("gpu_utilization", "GPU"),
		`metric is "a/b"; use lower-case letters`:                 change("gpu_utilization", "a/b"),
		`line 6: unit is "percents"; it must be one of percent`:   change("percent\n", "percents\n"),
		`line 9: window is "60"; write a duration like 60s`:       good + "  window: 60\n",
		"line 9: window is 2h; it must be 1s to 1h0m0s":           good + "  window: 2h\n",
		`missing is "zero"; it must be one of hold, fail`:         good + "  missing: zero\n",
		"holdFor is 5s, less than maxAge 15s":                     good + "  holdFor: 5s\n",
		"aggregate is for per: workload":                          good + "  aggregate: max\n",
		"line 7: expr is no PromQL":                               change("rate(a[$window])", "rate(a[$window]"),
		"expr gives a scalar; it must give an instant vector":     change("100 * rate(a[$window]) / rate(b[$window])", "1"),
		"expr looks back 5m0s, further than the window of 1m0s":   change("rate(a[$window])", "rate(a[5m])"),
		"expr joins (group_left, group_right)":                    change("/ rate(b[$window])", "* on(pod_uid) group_left(model) capstan_gpu_info"),
		`freshness is "rate(b[1m])"; it must be a plain selector`: change("freshness: b", "freshness: rate(b[1m])"),
		`metric "gpu_utilization" is there already, at line 4`:    good + strings.TrimPrefix(good, head),
		"a rule has the field help twice":                         good + "  help: again\n",
	} {
		_, err := Parse("x.yaml", []byte(file))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "x.yaml: ") {
			t.Errorf("got %v\nwant %s, in\n%s", err, want, file)
		}
	}
}

func TestDefaultsAreRight(t *testing.T) {
	names := map[string]Rule{}
	for _, r := range Default() {
		names[r.Metric] = r
		if r.HoldFor < r.Window+3*5*time.Second {
			t.Errorf("%s: holdFor %s is less than window and three scrapes", r.Metric, r.HoldFor)
		}
	}
	u := names["gpu_utilization"]
	if u.Per != PerPod || u.Unit != Percent || u.Missing != Hold {
		t.Errorf("gpu_utilization: %+v", u)
	}
	if s := names["training_steps_per_second"]; s.Aggregate != Max {
		t.Errorf("a step is the ring's, its aggregate is %q", s.Aggregate)
	}
}

// A file that is taken gives rules that the engine can evaluate; one that is refused is refused with a line.
func FuzzParse(f *testing.F) {
	f.Add(string(defaultYAML))
	f.Add(good)
	f.Add(head + "- &a {metric: m}\n- *a\n")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := Parse("x.yaml", []byte(text))
		if err != nil {
			if len(list) != 0 || !strings.HasPrefix(err.Error(), "x.yaml: ") {
				t.Fatalf("%d rules and the error %v", len(list), err)
			}
			return
		}
		for _, r := range list {
			for _, q := range []string{r.Query(), r.FreshnessQuery()} {
				if _, err := parser.NewParser(parser.Options{}).ParseExpr(q); err != nil {
					t.Fatalf("rule %+v is taken, but %s: %v", r, q, err)
				}
			}
			if r.Window <= 0 || r.HoldFor < 0 || strings.ToLower(r.Metric) != r.Metric {
				t.Fatalf("rule %+v is taken", r)
			}
		}
	})
}
