package rules

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/rules/document"
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
		MaxAge: 15 * time.Second, Missing: Hold, HoldFor: 75 * time.Second, JoinFor: 2 * time.Minute, Per: PerPod, Collect: Always}
	if len(list) != 1 || list[0] != want {
		t.Errorf("got %+v, want %+v", list, want)
	}
	if q := list[0].Query(); q != "100 * rate(a[60s]) / rate(b[60s])" {
		t.Errorf("query %s", q)
	}
}

// Every error names file, line, column, field, value, bound, and what to write.
func TestCheckSays(t *testing.T) {
	change := func(from, to string) string { return strings.Replace(good, from, to, 1) }
	expr := func(text string) string {
		return strings.Replace(good, "100 * rate(a[$window]) / rate(b[$window])", text, 1)
	}
	for _, c := range []struct{ want, file string }{
		{"x.yaml:1:1: the file is empty", ""},
		{"x.yaml:1:1: the file is empty", "# only a comment\n"},
		{"x.yaml:1:1: it is no YAML: did not find expected node content", "a: [\n,b]\n"},
		{"x.yaml:2:3: there is a byte that is no text: write the file in UTF-8", "a:\n  \x00\n"},
		{"x.yaml:9:1: a second document begins here: put it into a file of its own", good + "---\n" + good},
		{"x.yaml:1:1: kind: it is missing: write Rules", strings.Replace(good, "kind: Rules\n", "", 1)},
		{`x.yaml:1:13: apiVersion: "v9" is not what this version reads: write capstan.dev/v1alpha1`, change("capstan.dev/v1alpha1", "v9")},
		{"x.yaml:3:8: rules: it is empty: write a list of at least one rule", strings.TrimSpace(head) + " []\n"},
		{"x.yaml:3:7: rules: it is empty: write a list", head},
		{`x.yaml:3:8: rules: it is "all": write a list`, strings.TrimSpace(head) + " all\n"},
		{`x.yaml:4:3: rules[0]: it is "gpu": write a mapping of metric, help`, head + "- gpu\n"},
		{"x.yaml:4:3: rules[0].metrics: there is no such field: write metric", change("metric:", "metrics:")},
		{"x.yaml:4:3: rules[0].metric: it is missing: write the name that the HPA asks for", change("metric: gpu_utilization\n  ", "")},
		{`rules[0].metric: "GPU" is no name that the HPA can ask for, which asks in lower case and by a path: write gpu`, change("gpu_utilization", "GPU")},
		{`rules[0].metric: "a/b%c" is no name that the HPA can ask for, which asks in lower case and by a path: write a_b_c`, change("gpu_utilization", "a/b%c")},
		{`rules[0].metric: ".." is no name`, change("gpu_utilization", "..")},
		{`x.yaml:9:11: rules[1].metric: "gpu_utilization" is already the metric of line 4: give one of them another name`, good + strings.TrimPrefix(good, head)},
		{`x.yaml:6:9: rules[0].unit: "percents" is unknown: write percent`, change("percent\n", "percents\n")},
		{`x.yaml:9:11: rules[0].window: "5" has no unit: write 5s`, good + "  window: 5\n"},
		{"x.yaml:9:11: rules[0].window: 2h is too long: write 1s to 1h", good + "  window: 2h\n"},
		{"rules[0].window: 500ms is too short: write 1s to 1h", good + "  window: 500ms\n"},
		{`rules[0].window: "a minute" is no duration: write one like 90s`, good + "  window: a minute\n"},
		{"rules[0].window: it is a list: write one value", good + "  window: [60s]\n"},
		{"rules[0].window: it has no value: write one, or leave the field out", good + "  window:\n"},
		{"rules[0].maxAge: 1500.5ms is finer than a millisecond: write 1.501s", good + "  maxAge: 1500.5ms\n"},
		{`rules[0].missing: "zero" is unknown: write one of hold, fail`, good + "  missing: zero\n"},
		{"x.yaml:9:12: rules[0].holdFor: 5s is less than maxAge 15s", good + "  holdFor: 5s\n"},
		{"x.yaml:9:12: warning: rules[0].holdFor: 1m is less than the window and three scrapes", good + "  holdFor: 60s\n"},
		{"x.yaml:9:14: rules[0].aggregate: a rule that is per pod serves every pod's own value", good + "  aggregate: max\n"},
		{"x.yaml:9:3: rules[0].help: it is there twice, first in line 5: leave one out", good + "  help: again\n"},
		{"x.yaml:4:3: rules[0].maxAge: 15s is less than two intervals of 30s, so that one lost scrape is an outage: write 1m30s", good},
		{"x.yaml:4:3: rules[0].window: 1m is less than three intervals of 30s, which is not enough for a rate: write at least 1m30s", good},

		{"rules[0].expr: it gives a scalar: write an expression that gives an instant vector", expr("1")},
		{"rules[0].expr: it looks back 5m at a, further than the window of 1m: write [$window], or a longer window", expr("rate(a[5m]) + b")},
		{"rules[0].expr: it looks back 1m30s at a offset 30s, further", expr("rate(a[$window] offset 30s) + b")},
		{"rules[0].expr: it looks back 2m at a, further", expr("max_over_time(rate(a[$window])[1m:5s]) + b")},
		{"rules[0].expr: it has an offset of -5s, which is in the future", expr("a offset -5s + b")},
		{"rules[0].expr: it selects by @: a rule speaks of now", expr("a @ 0 + b")},
		{"rules[0].expr: the subquery b[1m:] has no step: write one, such as [$window:5s]", expr("max_over_time(b[1m:])")},
		{"rules[0].expr: its elements lose the label pod_uid, by which the adapter finds their pods: add pod_uid to by or on", expr("sum by (pod) (b)")},
		{"warning: rules[0].expr: a join (on (pod_uid) group_left): one duplicate among the series of its unique side fails the query", expr("b * on(pod_uid) group_left(model) capstan_gpu_info")},
		{"warning: rules[0].expr: capstan_pod_gpu_busy_seconds_total without its twin: an exporter that freezes reads 0 instead of missing: divide its rate by that of capstan_pod_gpu_observed_seconds_total",
			expr("rate(capstan_pod_gpu_busy_seconds_total[$window]) + b")},
		{`rules[0].freshness: "rate(b[1m])" is no plain selector: write one`, change("freshness: b", "freshness: rate(b[1m])")},
		{`rules[0].freshness: "b offset 1m" is no plain selector`, change("freshness: b", "freshness: b offset 1m")},
		{"rules[0].freshness: it is no PromQL", change("freshness: b", "freshness: b{")},
		{"warning: rules[0].freshness: expr does not use c: an old value could pass for a fresh one: select a series of expr, such as a or b", change("freshness: b", "freshness: c")},
	} {
		interval := time.Duration(0)
		if c.file == good {
			interval = 30 * time.Second
		}
		list, problems := Check("x.yaml", []byte(c.file), interval)
		warning := strings.Contains(c.want, "warning: ")
		found := slices.ContainsFunc(problems, func(p document.Problem) bool {
			return strings.Contains(p.Error(), c.want) && p.Warning == warning && strings.HasPrefix(p.Error(), "x.yaml:")
		})
		if !found || (list == nil) == warning {
			t.Errorf("got %d rules and %v\nwant %s, in\n%s", len(list), problems, c.want, c.file)
		}
	}
}

// PromQL's own complaint stands at its place in the file, whatever the length of the window's variable.
func TestCheckPointsIntoTheExpression(t *testing.T) {
	for file, want := range map[string]string{
		"rate(a[$window]) / rate(b[$window]": "x.yaml:7:43: rules[0].expr: it is no PromQL (unclosed left parenthesis): write PromQL",
		"rate(a[$window]) / !":               "x.yaml:7:28: rules[0].expr: it is no PromQL (unexpected character after '!'",
		"|\n    rate(a[$window])\n    / (":   "x.yaml:7:9: rules[0].expr: it is no PromQL (2:4: parse error: unclosed left parenthesis)",
		`"rate(a[$window]) / ("`:             "x.yaml:7:9: rules[0].expr: it is no PromQL (1:17: parse error: unclosed left parenthesis)",
		"rate(a[$window])\n    / (":          "x.yaml:7:9: rules[0].expr: it is no PromQL (1:17",
	} {
		_, problems := Check("x.yaml", []byte(strings.Replace(good, "100 * rate(a[$window]) / rate(b[$window])", file, 1)), 0)
		if len(problems) != 1 || !strings.HasPrefix(problems[0].Error(), want) {
			t.Errorf("%s\ngot  %v\nwant %s", file, problems, want)
		}
	}
}

// All that is wrong with a file is said at once, in its order.
func TestCheckSaysEverything(t *testing.T) {
	list, problems := Check("x.yaml", []byte(`apiVersion: capstan.dev/v1
kind: Rule
rules:
- metric: GPU
  help:
  expr: sum(
  window: 5
  holdFor: 10s
- metric: steps
  hepl: Steps.
  expr: sum by (pod) (a)
  freshness: a
  per: pods
`), 0)
	var got []string
	for _, p := range problems {
		got = append(got, fmt.Sprintf("%d:%d %s", p.Line, p.Column, p.Field))
	}
	want := []string{"1:13 apiVersion", "2:7 kind", "4:3 rules[0].freshness", "4:11 rules[0].metric", "5:8 rules[0].help", "6:13 rules[0].expr", "7:11 rules[0].window",
		"8:12 rules[0].holdFor", "9:3 rules[1].help", "10:3 rules[1].hepl", "11:9 rules[1].expr", "13:8 rules[1].per"}
	if list != nil || !slices.Equal(got, want) {
		t.Errorf("got %d rules and %q\nwant %q\n%v", len(list), got, want, problems)
	}
	if _, err := Parse("x.yaml", []byte("kind: Rules")); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("Parse says %v, want two lines", err)
	}
}

// What keeps pod_uid, and what is no join that can fail, is taken without a word.
func TestCheckIsContent(t *testing.T) {
	for _, expr := range []string{
		"sum by (pod_uid) (b)", "sum without (shared) (b)", "topk by (namespace) (1, b)", "a and on (pod_uid) b", "b or c", "b unless on (pod) c", "-b", "(b)", "b * 2", "2 * b",
		"b > bool 1", "clamp_max(b, 1)", "avg_over_time(b[$window])", "max_over_time(rate(b[30s])[30s:5s])", `label_replace(sum by (x) (b), "pod_uid", "$1", "x", "(.*)")`,
		"b * on (pod_uid) group_left max by (pod_uid) (c)", "sum by (pod_uid) (b) / on (pod_uid) (sum by (pod_uid) (c))", "histogram_quantile(0.9, b)", "a offset 10s + b",
		`{__name__="b"}`, `{__name__=~"b|c"}`, "b{x='$window'}",
	} {
		file := strings.Replace(good, "100 * rate(a[$window]) / rate(b[$window])", "|\n    "+expr, 1)
		if list, problems := Check("x.yaml", []byte(file), 5*time.Second); len(problems) != 0 || len(list) != 1 {
			t.Errorf("%s: %v", expr, problems)
		}
	}
	for _, expr := range []string{"sum without (pod_uid) (b)", "b / ignoring (pod_uid) c", "b / on (pod) c", "absent(b)", "vector(1)", "sum by (pod) (b) or vector(1)", "count_values by (x) (\"y\", b)",
		"time() + sum(b)", "histogram_quantile(0.9, sum by (le) (b))"} {
		file := strings.Replace(good, "100 * rate(a[$window]) / rate(b[$window])", "|\n    "+expr, 1)
		if _, problems := Check("x.yaml", []byte(file), 0); document.Refused(problems) == nil || !strings.Contains(document.Refused(problems).Error(), "lose the label pod_uid") {
			t.Errorf("%s: %v", expr, problems)
		}
	}
}

// Aliases stand for what they name, and a problem is where the alias is.
func TestCheckFollowsAliases(t *testing.T) {
	file := good + "  window: &w 30s\n  joinFor: *w\n" + strings.Replace(strings.TrimPrefix(good, head), "gpu_", "cpu_", 1) + "  maxAge: *w\n  missing: *w\n"
	list, problems := Check("x.yaml", []byte(strings.Replace(file, "  missing: *w\n", "", 1)), 0)
	if len(problems) != 0 || list[0].JoinFor != 30*time.Second || list[1].MaxAge != 30*time.Second {
		t.Errorf("%+v %v", list, problems)
	}
	if _, problems := Check("x.yaml", []byte(file), 0); len(problems) != 1 || problems[0].Line != 17 || problems[0].Column != 12 {
		t.Errorf("%v", problems)
	}
	for _, loop := range []string{"rules: &a [*a]", "rules: [&a {metric: *a}]", "&a {rules: *a}"} {
		if _, err := Parse("x.yaml", []byte(loop)); err == nil {
			t.Errorf("%s is taken", loop)
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

var lineBreak = regexp.MustCompile("\r\n|\r|\n|\u0085|\u2028|\u2029")

// Whatever the bytes: a file that is taken gives rules that keep every bound and that the engine can evaluate, and one that is refused
// is refused with a place inside it. The same bytes say the same.
func FuzzParse(f *testing.F) {
	f.Add(string(defaultYAML))
	f.Add(good)
	f.Add(head + "- &a {metric: m}\n- *a\n")
	f.Add(good + "  window: 1h\n  maxAge: 10m\n  holdFor: 1h\n  joinFor: 0s\n  per: workload\n  aggregate: sum\n")
	f.Add(strings.Replace(good, "freshness: b", "freshness: 'b # c'", 1))
	f.Add(strings.Replace(good, "rate(a[$window])", "max_over_time(rate(a[30s])[30s:1s]) * on (pod_uid) group_left c", 1))
	f.Add(good + "---\n" + good)
	f.Add("0:\n  0: 0\n 0: :0: 0")
	f.Add("a: b\r\rc: d\r\ne: f\u2028g: h")
	f.Fuzz(func(t *testing.T, text string) {
		list, problems := Check("x.yaml", []byte(text), 0)
		err := document.Refused(problems)
		if again, more := Check("x.yaml", []byte(text), 0); !slices.Equal(list, again) || !slices.Equal(problems, more) {
			t.Fatalf("once %v %v, then %v %v", list, problems, again, more)
		}
		for _, p := range problems {
			if p.Line < 1 || p.Line > 1+len(lineBreak.FindAllString(text, -1)) || p.Column < 1 || p.Message == "" || p.File != "x.yaml" {
				t.Fatalf("%+v is nowhere in the file", p)
			}
		}
		if (err == nil) != (len(list) > 0) {
			t.Fatalf("%d rules and the error %v", len(list), err)
		}
		metrics := map[string]bool{}
		for _, r := range list {
			if expr, err := parseExpr(r.Query()); err != nil || expr.Type() != parser.ValueTypeVector {
				t.Fatalf("rule %+v is taken, but its expression is %v %v", r, expr, err)
			}
			if _, err := parseExpr(r.FreshnessQuery()); err != nil {
				t.Fatalf("rule %+v is taken, but %s: %v", r, r.FreshnessQuery(), err)
			}
			within := func(d, least, most time.Duration) bool { return d >= least && d <= most && d%time.Millisecond == 0 }
			if !within(r.Window, time.Second, time.Hour) || !within(r.MaxAge, time.Second, 10*time.Minute) || !within(r.HoldFor, r.MaxAge, 2*time.Hour) || !within(r.JoinFor, 0, time.Hour) {
				t.Fatalf("rule %+v is taken", r)
			}
			if strings.ToLower(r.Metric) != r.Metric || strings.ContainsAny(r.Metric, "/% ?#") || strings.Trim(r.Metric, ".") == "" || metrics[r.Metric] || r.Help == "" {
				t.Fatalf("rule %+v is taken", r)
			}
			if !slices.Contains(units, r.Unit) || r.Missing != Hold && r.Missing != Fail || (r.Per == PerWorkload) != (r.Aggregate == Max || r.Aggregate == Sum) || r.Per != PerPod && r.Per != PerWorkload ||
				r.Collect != Always && r.Collect != Asked {
				t.Fatalf("rule %+v is taken", r)
			}
			metrics[r.Metric] = true
		}
	})
}
