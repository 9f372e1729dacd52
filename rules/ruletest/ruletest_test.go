package ruletest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func parse(t *testing.T, name string) File {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	f, problems := Parse(filepath.Base(name), data)
	for _, p := range problems {
		t.Error(p)
	}
	if t.Failed() {
		t.FailNow()
	}
	return f
}

// The shipped rules do what the shipped example says, which is the worked example of the documentation.
func TestDefaultRules(t *testing.T) {
	f := parse(t, "../default_test.yaml")
	for _, test := range f.Tests {
		t.Run(test.Name, func(t *testing.T) {
			failures, err := f.Run(t.Context(), test, rules.Default())
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range failures {
				t.Errorf("line %d, at %s, %s: want %q\ngot %q %q", f.Line, f.At, f.Metric, f.Want, f.Got, f.Notes)
			}
		})
	}
}

// The example notices when the rules do something else: none of these changes to them passes it.
func TestDefaultRulesNotices(t *testing.T) {
	f := parse(t, "../default_test.yaml")
	for what, change := range map[string]func(*rules.Rule){
		"busy time alone":         func(r *rules.Rule) { r.Expr = "100 * rate(capstan_pod_gpu_busy_seconds_total[$window])" },
		"a sum over the GPUs":     func(r *rules.Rule) { r.Expr = strings.Replace(r.Expr, "100", "200", 1) },
		"a shorter window":        func(r *rules.Rule) { r.Window = 30 * time.Second },
		"no holding":              func(r *rules.Rule) { r.Missing = rules.Fail },
		"holding for longer":      func(r *rules.Rule) { r.HoldFor = 2 * time.Minute },
		"a shorter joinFor":       func(r *rules.Rule) { r.JoinFor = time.Minute },
		"values that are older":   func(r *rules.Rule) { r.MaxAge = 30 * time.Second },
		"the sum of steps":        func(r *rules.Rule) { r.Aggregate = rules.Sum },
		"the maximum of samples":  func(r *rules.Rule) { r.Aggregate = rules.Max },
		"one item for the worker": func(r *rules.Rule) { r.Per = rules.PerWorkload },
	} {
		list := rules.Default()
		for i := range list {
			change(&list[i])
		}
		failed := 0
		for _, test := range f.Tests {
			failures, err := f.Run(t.Context(), test, list)
			if err != nil {
				t.Fatal(err)
			}
			failed += len(failures)
		}
		if failed == 0 {
			t.Errorf("%s: all tests pass", what)
		}
	}
}

const head = "apiVersion: capstan.dev/v1alpha1\nkind: RuleTests\ntests:\n- name: t\n  metric: m\n"

var rule = rules.Rule{Metric: "m", Unit: rules.Percent, Expr: "a", Freshness: "a", Window: 10 * time.Second, MaxAge: 10 * time.Second, HoldFor: 30 * time.Second,
	JoinFor: 20 * time.Second, Missing: rules.Hold, Per: rules.PerPod}

// What is wanted and what is there are told apart line by line, as testdata/diff.txt shows.
func TestFailures(t *testing.T) {
	f, problems := Parse("x.yaml", []byte(head+`  states:
  - pods: [{name: w-0, readySince: -1m}, {name: w-1, readySince: -1m}, {name: w-10, readySince: -1m}, {name: w-2, readySince: -1m}, {name: w-3, phase: Pending}]
  series:
  - {series: a, pods: [w-0, w-1], values: 1x20}
  - {series: a, pods: [w-2, w-10], values: 12.3456x2}
  expect:
  - {at: 10s, items: {w-0: 1, w-1: 1, w-2: 12.346, w-10: 12.3461}}
  - {at: 10s, items: {w-0: 1, w-1: 2, w-4: 3, w-10: 12.346 held}}
  - {at: 10s, error: missing}
  - {at: 20s, items: {w-0: 1, w-1: 1, w-2: 12.346, w-10: 12.346}}
  - {at: 45s, items: {w-0: 1}}
  - {at: 45s, error: no valid value for 30s}
  - {at: 45s, error: w-2 has had no valid value for 35s (holdFor 30s)}
  - {at: 0s, metric: n, items: {w-0: 1}}
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	failures, err := f.Run(t.Context(), f.Tests[0], []rules.Rule{rule})
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, f := range failures {
		fmt.Fprintf(&got, "line %d, at %s, %s:\n%s\n", f.Line, f.At, f.Metric, strings.Join(f.Diff, "\n"))
		for _, n := range f.Notes {
			fmt.Fprintf(&got, "  (%s)\n", n)
		}
	}
	golden := "testdata/diff.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("it is now (go test ./rules/ruletest -update rewrites %s)\n%s", golden, &got)
	}
}

// A metric need not be named where there is only one; the rules' retention is the test's.
func TestRunFindsTheOnlyMetric(t *testing.T) {
	f, problems := Parse("x.yaml", []byte(strings.Replace(head, "  metric: m\n", "", 1)+"  states: [{pods: [{name: w-0, readySince: -1m}]}]\n  series: [{series: a, pods: [w-0], values: 5x2}]\n  expect: [{at: 10s, items: {w-0: 5}}]\n"))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	if failures, err := f.Run(t.Context(), f.Tests[0], []rules.Rule{rule}); err != nil || len(failures) != 0 {
		t.Errorf("%+v %v", failures, err)
	}
	other := rule
	other.Metric = "n"
	if failures, err := f.Run(t.Context(), f.Tests[0], []rules.Rule{rule, other}); err != nil || len(failures) != 1 || failures[0].Got[0] != "error: which metric is not said; there are m, n" {
		t.Errorf("%+v %v", failures, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Run(ctx, f.Tests[0], []rules.Rule{rule}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// Another namespace's duplicates make the fleet's query fail, which costs this workload nothing.
func TestRunByNamespace(t *testing.T) {
	f, problems := Parse("x.yaml", []byte(head+`  states: [{pods: [{name: w-0, readySince: -1m}]}]
  series:
  - {series: a, pods: [w-0], values: 6x2}
  - {series: b, pods: [w-0], values: 2x2}
  - {series: 'a{namespace="bad", pod_uid="u"}', values: 6x2}
  - {series: 'b{namespace="bad", pod_uid="u", x="1"}', values: 2x2}
  - {series: 'b{namespace="bad", pod_uid="u", x="2"}', values: 2x2}
  expect: [{at: 10s, items: {w-0: 3}}]
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	r := rule
	r.Expr = "a / on (pod_uid) b"
	if failures, err := f.Run(t.Context(), f.Tests[0], []rules.Rule{r}); err != nil || len(failures) != 0 {
		t.Errorf("%+v %v", failures, err)
	}
}

// What exporters say goes through the adapter's decoder: each speaks for its own node, and rings are read off their pages.
func TestRunDecodes(t *testing.T) {
	f, problems := Parse("x.yaml", []byte(head+`  states: [{pods: [{name: w-0, node: n-1, readySince: -1m}, {name: w-1, node: n-2, readySince: -1m}]}]
  series:
  - {series: 'a{x="quote \" backslash \\ and\nnewline"}', pods: [w-0, w-1], values: 1 2 3x20}
  - {series: 'a{pod_uid="w-1", node="n-1"}', values: 99x20}
  - {series: capstan_training_ring_generation, pods: [w-0], values: 5x2 6 6 stale}
  - {series: capstan_training_ring_generation, pods: [w-1], values: 5x4 _x20}
  expect:
  - {at: 5s, error: "measured for 5s; a vector needs 10s"}
  - {at: 15s, error: "1 of 1 workers of worker have reported"}
  - {at: 35s, items: {w-0: 3, w-1: 3}}
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	failures, err := f.Run(t.Context(), f.Tests[0], []rules.Rule{rule})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range failures {
		t.Errorf("%+v", f)
	}
}

func TestParseSays(t *testing.T) {
	body := "  states: [{pods: [w-0]}]\n  series: [{series: a, pods: [w-0], values: 1x9}]\n  expect: [{at: 5s, items: {w-0: 1}}]\n"
	change := func(from, to string) string { return head + strings.Replace(body, from, to, 1) }
	for want, file := range map[string]string{
		"x.yaml:4:3: tests[0].expect: it is missing: write a list of at least one moment":                            head + "  states: [{pods: [w-0]}]\n",
		"x.yaml:4:3: tests[0].states: it is missing: write a list of the workload's pods from a moment on":           head + "  expect: [{at: 0s, error: x}]\n",
		`tests[1].name: "t" is already the name of a test: give one of them another`:                                 head + body + strings.Replace(strings.SplitAfterN(head, "tests:\n", 2)[1], "", "", 1) + body,
		`x.yaml:1:13: apiVersion: "v1" is not what this version reads: write capstan.dev/v1alpha1`:                   strings.Replace(head+body, "capstan.dev/v1alpha1", "v1", 1),
		"tests[0].expect[0].at: 7s is between two ticks of 5s: write 5s or 10s":                                      change("at: 5s", "at: 7s"),
		"tests[0].expect[0].at: 25h is too long: write 0s to 24h":                                                    change("at: 5s", "at: 25h"),
		"tests[0].expect[0].at: it is missing: write the time since the test's start":                                change("at: 5s, ", ""),
		"tests[0].expect[0]: an HPA gets items or an error: write one of both":                                       change("at: 5s, ", "at: 5s, error: x, "),
		"tests[0].expect[0].items: there is none, but an HPA gets at least one or an error":                          change("{w-0: 1}}", "{}}"),
		`tests[0].expect[0].items.w-0: "-1" is no value that is ever served`:                                         change("w-0: 1}", "w-0: -1}"),
		`tests[0].expect[0].items.w-0: "NaN" is no value that is ever served`:                                        change("w-0: 1}", "w-0: NaN}"),
		`tests[0].expect[0].items.w-0: "1 help" is no value`:                                                         change("w-0: 1}", "w-0: 1 help}"),
		"tests[0].states[0].at: 5s is not the test's start: write 0s in the first state":                             change("{pods:", "{at: 5s, pods:"),
		"tests[0].states[1].at: 0s is not after the state before, which is at 0s: write a later one":                 change("w-0]}", "w-0]}, {pods: []}"),
		"tests[0].states[0].pods: it is missing: write the pods' names, or [] for none":                              change("{pods: [w-0]}", "{at: 0s}"),
		"tests[0].states[0].pods[1]: pod w-0 with the UID w-0 is there twice":                                        change("[w-0]", "[w-0, w-0]"),
		`tests[0].states[0].pods[0].phase: "Runing" is unknown: write Running`:                                       change("[w-0]", "[{name: w-0, phase: Runing}]"),
		`tests[0].states[0].pods[0].gpus: "-1" is no number from 0 to 1024: write one`:                               change("[w-0]", "[{name: w-0, gpus: -1}]"),
		`tests[0].states[0].pods[0].ready: "yes" is unknown: write one of true, false`:                               change("[w-0]", "[{name: w-0, ready: yes}]"),
		`tests[0].series[0].series: "a{" is no series`:                                                               change("series: a", "series: 'a{'"),
		`tests[0].series[0].series: "{\"a b\"}" is no series`:                                                        change("series: a", `series: '{"a b"}'`),
		`tests[0].series[0].series: "{x=\"y\"}" is no series`:                                                        change("series: a", `series: '{x="y"}'`),
		`tests[0].series[0].series: "a 1" is no series`:                                                              change("series: a", "series: a 1"),
		`tests[0].series[0].values: "1x" are no values: write them like 1 2 _ stale`:                                 change("1x9", "1x"),
		`tests[0].series[0].values: "{x=\"1\"} 1" are no values`:                                                     change("1x9", `'{x="1"} 1'`),
		"tests[0].series[0].values: there are more than 99999 repetitions: write fewer":                              change("1x9", "1x100000"),
		"tests[0].series[0].values: there is something among them that the adapter does not take from an exporter":   change("1x9", "1 NaN"),
		"tests[0].series[0].values: there is something among them that the adapter does not take":                    change("1x9", "'{{schema:0 count:1 sum:1}}'"),
		`tests[0].series[0].pods[0]: no state has a pod "w-9": write one of w-0`:                                     change("pods: [w-0], values", "pods: [w-9], values"),
		"tests[0].series[0].pods[0]: pod w-0 has several UIDs: leave it out here":                                    change("[w-0]}", "[w-0]}, {at: 5s, pods: [{name: w-0, uid: other}]}"),
		`x.yaml:6:3: tests[0].state: there is no such field: write states`:                                           change("states:", "state:"),
		"interval: 2h is too long: write 1s to 1m":                                                                   "interval: 2h\n" + head + body,
		"rules: it is empty: write the name of a rule file beside this one, or leave the field out for the built-in": "rules: ''\n" + head + body,
	} {
		f, problems := Parse("x.yaml", []byte(file))
		if !slices.ContainsFunc(problems, func(p document.Problem) bool { return strings.Contains(p.Error(), want) }) || len(f.Tests) != 0 {
			t.Errorf("got %v\nwant %s, in\n%s", problems, want, file)
		}
	}
	if f, problems := Parse("x.yaml", []byte(head+body)); len(problems) != 0 || len(f.Tests) != 1 || f.Tests[0].Line != 4 {
		t.Errorf("the file that all of these change: %v", problems)
	}
}

// Whatever the bytes: a file that is taken runs, and says of each of its expectations at most once that it failed.
func FuzzParse(f *testing.F) {
	data, err := os.ReadFile("../default_test.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, test := range strings.SplitAfter(string(data), "\n\n") {
		_, test, _ := strings.Cut(test, "- name:")
		f.Add("apiVersion: capstan.dev/v1alpha1\nkind: RuleTests\ntests:\n  - name:" + test)
	}
	f.Fuzz(func(t *testing.T, text string) {
		file, problems := Parse("x.yaml", []byte(text))
		if (document.Refused(problems) == nil) != (len(file.Tests) > 0) {
			t.Fatalf("%d tests and %v", len(file.Tests), problems)
		}
		for _, test := range file.Tests {
			if last := test.expect[len(test.expect)-1].at; last > 10*time.Minute || len(test.expect) > 50 {
				continue // right, but long
			}
			failures, err := file.Run(t.Context(), test, rules.Default())
			if err != nil || len(failures) > len(test.expect) {
				t.Fatalf("%d failures of %d expectations, %v", len(failures), len(test.expect), err)
			}
			for _, f := range failures {
				if len(f.Want) == 0 || len(f.Got) == 0 || len(f.Diff) == 0 {
					t.Fatalf("a failure that says nothing: %+v", f)
				}
			}
		}
	})
}
