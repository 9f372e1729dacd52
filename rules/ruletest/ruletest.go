// Package ruletest runs tests of rule files: given these series and these pods, an HPA would get these items, or this error.
//
// A test goes through what the adapter goes through, tick by tick: exporters' pages are decoded into the store of samples, Prometheus'
// engine evaluates, package reading finds the pods, and rules.Decide decides. So what is held and what is given up is the adapter's own
// word. There is no clock and no I/O; a test of hours takes a second.
package ruletest

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
	"github.com/capstan-gpu/capstan/rules/reading"
)

// File is a file of tests.
type File struct {
	Name     string
	Rules    string        // the rule file's name, as the test file says it: relative to its folder; "" = the built-in rules
	Interval time.Duration // between two ticks of the adapter, each with one scrape
	Tests    []Test
}

// Test is one story of one workload. Its times count from its start, where the adapter has just started, too.
type Test struct {
	Name   string
	Line   int // in the file
	series []series
	states []state       // rising; the first at 0
	expect []expectation // rising
}

// state is the workload from a moment on. Times in it count from the start of the test, too.
type state struct {
	at       time.Duration
	workload func(start time.Time) rules.Workload
}

// expectation is what an HPA should get at a moment.
type expectation struct {
	line, column int
	at           time.Duration
	metric       string // "" = that of the only rule
	items        []item // none = an error
	err          string // that contains this
}

type item struct {
	name  string // of the pod; for a rule that is per workload, of the workload
	milli int64  // thousandths, as the HPA gets them
	held  bool
}

func (i item) String() string {
	text := i.name + " " + strconv.FormatFloat(float64(i.milli)/1000, 'f', -1, 64)
	if i.held {
		text += " held"
	}
	return text
}

// Failure is an expectation that did not come true.
type Failure struct {
	Line   int      `json:"line"` // of the expectation, in the test file
	Column int      `json:"column"`
	At     string   `json:"at"` // since the test's start
	Metric string   `json:"metric"`
	Want   []string `json:"want"` // items, or one error
	Got    []string `json:"got"`
	Diff   []string `json:"diff"`            // of both: "- " what is missing, "+ " what is there instead, "  " what is right
	Notes  []string `json:"notes,omitempty"` // the policy's: who is not counted, and why a value stands
}

// start of every test. Any moment will do, but one that is a whole number of seconds.
var start = time.Unix(1_800_000_000, 0).UTC()

// Run runs a test of a file against a list of rules, and returns what failed, in the order of the file. The error is the context's, or that
// a page cannot be read.
func (f File) Run(ctx context.Context, t Test, list []rules.Rule) (failures []Failure, err error) {
	samples := store.New(store.Config{Retention: reading.Retention(list, f.Interval)})
	exporters := newExporters(t.series, samples)
	readers := map[string]reading.Reader{}
	memory := map[string]rules.Memory{}
	for _, e := range t.expect {
		if r, err := find(list, e.metric); err != nil {
			failures = append(failures, e.failure(e.metric, rules.Answer{Err: err}))
		} else if _, have := readers[r.Metric]; !have {
			readers[r.Metric] = reading.Embedded(r, samples)
		}
	}
	last := t.expect[len(t.expect)-1].at
	for tick := 0; time.Duration(tick)*f.Interval <= last; tick++ {
		at := time.Duration(tick) * f.Interval
		now := start.Add(at)
		if err := cmp.Or(ctx.Err(), exporters.scrape(tick, now)); err != nil {
			return nil, err
		}
		samples.Prune(now)
		w := t.state(at).workload(start)
		for i := range w.Pods {
			w.Pods[i].Ring = exporters.rings[w.Pods[i].UID]
		}
		fleet := reading.NewFleet([]rules.Workload{w}, nil)
		for metric, reader := range readers {
			a := rules.Answer{Err: reader.Wait(at)}
			if a.Err == nil {
				a, memory[metric] = reader.Read(ctx, fleet, now).Decide(reader.Rule, w, memory[metric], now)
			}
			for _, e := range t.expect {
				if r, err := find(list, e.metric); err == nil && e.at == at && r.Metric == metric && !e.met(a) {
					failures = append(failures, e.failure(metric, a))
				}
			}
		}
	}
	slices.SortFunc(failures, func(a, b Failure) int { return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column)) })
	return failures, nil
}

// find is the rule of a metric; the only one where no metric is named.
func find(list []rules.Rule, metric string) (rules.Rule, error) {
	var names []string
	for _, r := range list {
		if r.Metric == metric || metric == "" && len(list) == 1 {
			return r, nil
		}
		names = append(names, r.Metric)
	}
	if metric == "" {
		return rules.Rule{}, fmt.Errorf("which metric is not said; there are %s", strings.Join(names, ", "))
	}
	return rules.Rule{}, fmt.Errorf("there is no metric %q; there are %s", metric, strings.Join(names, ", "))
}

// state is the newest one at a moment.
func (t Test) state(at time.Duration) state {
	now := t.states[0]
	for _, s := range t.states {
		if s.at <= at {
			now = s
		}
	}
	return now
}

// served are an answer's items, as the HPA gets them.
func served(a rules.Answer) (items []item) {
	for _, i := range a.Items {
		name := i.Pod
		if name == "" {
			name = i.Workload
		}
		items = append(items, item{name, int64(math.Round(i.Value * 1000)), i.Held})
	}
	return items
}

// met says whether the answer is the one that was expected.
func (e expectation) met(a rules.Answer) bool {
	if e.err != "" {
		return a.Err != nil && strings.Contains(a.Err.Error(), e.err)
	}
	got := served(a)
	return a.Err == nil && len(got) == len(e.items) && !slices.ContainsFunc(got, func(i item) bool { return !slices.Contains(e.items, i) })
}

func (e expectation) failure(metric string, a rules.Answer) Failure {
	f := Failure{Line: e.line, Column: e.column, At: document.Short(e.at), Metric: metric, Notes: a.Notes}
	got := served(a)
	for _, i := range e.items {
		f.Want = append(f.Want, i.String())
	}
	if e.err != "" {
		f.Want = []string{"error: … " + e.err + " …"}
	}
	for _, i := range got {
		f.Got = append(f.Got, i.String())
	}
	if a.Err != nil {
		f.Got = []string{"error: " + a.Err.Error()}
	}
	f.Diff = diff(f.Want, f.Got)
	return f
}

// diff shows, in the order of got, what is in both, and each line that is wanted before the one that took its place: that of the same
// name.
func diff(want, got []string) (lines []string) {
	name := func(line string) string { return line[:strings.IndexByte(line+" ", ' ')] }
	same := func(a string) func(string) bool { return func(b string) bool { return name(a) == name(b) } }
	for _, w := range want {
		if !slices.ContainsFunc(got, same(w)) {
			lines = append(lines, "- "+w)
		}
	}
	for _, g := range got {
		i := slices.IndexFunc(want, same(g))
		switch {
		case i >= 0 && want[i] == g:
			lines = append(lines, "  "+g)
			continue
		case i >= 0:
			lines = append(lines, "- "+want[i])
		}
		lines = append(lines, "+ "+g)
	}
	return lines
}
