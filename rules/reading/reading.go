// Package reading finds what a rule says of every pod of the fleet at one moment.
//
// The adapter's tick and the tests of rules go through it alike, so that no test can pass on what the adapter would not do. It judges
// no value: rules.Decide does, of what is found here.
package reading

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"

	"github.com/capstan-gpu/capstan/adapter/engine"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

// Fleet is who should report at one moment. Immutable.
type Fleet struct {
	namespaces []string // of the workloads, sorted, each once
	pods       map[string]*rules.Pod
	model      func(rules.Pod) string
}

// NewFleet makes a Fleet of all workloads. model says which GPU model a pod holds, "" if that is not known; nil = it never is.
func NewFleet(workloads []rules.Workload, model func(rules.Pod) string) *Fleet {
	f := &Fleet{pods: map[string]*rules.Pod{}, model: model}
	for _, w := range workloads {
		f.namespaces = append(f.namespaces, w.Namespace)
		for i := range w.Pods {
			f.pods[w.Pods[i].UID] = &w.Pods[i]
		}
	}
	slices.Sort(f.namespaces)
	f.namespaces = slices.Compact(f.namespaces)
	return f
}

// Reader evaluates one rule.
type Reader struct {
	Rule             rules.Rule
	Value, Freshness engine.Func // of Rule.Query and Rule.FreshnessQuery
}

// Embedded is a Reader by Prometheus' own engine over q.
func Embedded(r rules.Rule, q storage.Queryable) Reader {
	return Reader{
		Rule:      r,
		Value:     engine.Embedded(q, engine.Config{Lookback: r.MaxAge}),
		Freshness: engine.Embedded(q, engine.Config{Lookback: max(r.HoldFor, r.MaxAge)}), // the age of what is missing, too
	}
}

// Retention is how far back samples are needed for rules that are read once an interval.
func Retention(list []rules.Rule, interval time.Duration) time.Duration {
	longest := time.Duration(0)
	for _, r := range list {
		longest = max(longest, r.Window, r.MaxAge, r.HoldFor)
	}
	return longest + 5*interval
}

// Wait is why the rule cannot be read yet, when its samples have been collected only for so long: of less than a window a rate would
// speak as if it were a whole one. nil = it can.
func (r Reader) Wait(measured time.Duration) error {
	if measured >= r.Rule.Window {
		return nil
	}
	return fmt.Errorf("%w: measured for %s; a vector needs %s", rules.ErrCollecting, measured.Round(time.Second), r.Rule.Window)
}

// Found is what the queries of one rule said.
type Found struct {
	Readings map[string]rules.Reading // by pod UID
	Fresh    map[string]time.Time     // newest sample by pod UID, also of pods without a reading
	Err      error                    // of the query for the whole fleet; it was asked namespace by namespace then
	Failed   map[string]error         // by namespace: that query failed, too

	OtherNode  int // values of a pod by the exporter of a node that is not the pod's: not taken
	Duplicates int // pods with more than one value: which of them is right is not known, none is taken
}

// Read evaluates the rule for the fleet; if that fails, namespace by namespace, so that one tenant's data costs nobody else the signal.
func (r Reader) Read(ctx context.Context, fleet *Fleet, now time.Time) Found {
	found := Found{Readings: make(map[string]rules.Reading, len(fleet.pods)), Fresh: make(map[string]time.Time, len(fleet.pods)), Failed: map[string]error{}}
	values, ages, err := r.query(ctx, now, func(expr string) (string, error) { return expr, nil })
	if err != nil {
		found.Err = err
		values, ages = nil, nil
		for _, namespace := range fleet.namespaces {
			v, a, err := r.query(ctx, now, func(expr string) (string, error) { return InNamespace(expr, namespace) })
			if err != nil {
				found.Failed[namespace] = fmt.Errorf("the rule's query fails: %w", err)
				continue
			}
			values, ages = append(values, v...), append(ages, a...)
		}
	}
	found.take(fleet, values, ages)
	return found
}

// query evaluates both queries, as wrap makes them.
func (r Reader) query(ctx context.Context, now time.Time, wrap func(string) (string, error)) (values, ages []engine.Point, err error) {
	query, err := wrap(r.Rule.Query())
	if err != nil {
		return nil, nil, err
	}
	freshness, err := wrap(r.Rule.FreshnessQuery())
	if err != nil {
		return nil, nil, err
	}
	values, err = r.Value(ctx, query, now)
	ages, ageErr := r.Freshness(ctx, freshness, now)
	return values, ages, errors.Join(err, ageErr)
}

// take finds the pods that the points are about.
func (f *Found) take(fleet *Fleet, values, ages []engine.Point) {
	for _, p := range ages {
		uid := p.Labels.Get(metricname.PodUID)
		if at := time.UnixMilli(int64(p.Value * 1000)); at.After(f.Fresh[uid]) {
			f.Fresh[uid] = at
		}
	}
	twice := map[string]bool{}
	models := map[string]map[string]string{} // one map for all pods of a model
	for _, p := range values {
		uid := p.Labels.Get(metricname.PodUID)
		pod, known := fleet.pods[uid]
		if !known {
			continue // a pod that is no workload's, or that is gone
		}
		if node := p.Labels.Get(metricname.ItemNode); node != "" && node != pod.Node {
			f.OtherNode++ // an exporter speaks for its own node only
			continue
		}
		if _, had := f.Readings[uid]; had {
			twice[uid] = true
		}
		r := rules.Reading{PodUID: uid, Value: p.Value, At: f.Fresh[uid]}
		if fleet.model != nil {
			if m := fleet.model(*pod); m != "" {
				if models[m] == nil {
					models[m] = map[string]string{metricname.ItemGPUModel: m}
				}
				r.Labels = models[m]
			}
		}
		f.Readings[uid] = r
	}
	for uid := range twice {
		delete(f.Readings, uid)
	}
	f.Duplicates = len(twice)
}

// Decide is rules.Decide for what was found; where that is nothing because the query failed, the error says so.
func (f Found) Decide(r rules.Rule, w rules.Workload, m rules.Memory, now time.Time) (rules.Answer, rules.Memory) {
	a, m := rules.Decide(r, w, f.Readings, m, now)
	if err := f.Failed[w.Namespace]; err != nil && a.Err != nil {
		a.Err = fmt.Errorf("%w; %v", a.Err, err)
	}
	return a, m
}

// InNamespace is expr over the series of one namespace only.
func InNamespace(expr, namespace string) (string, error) {
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
	if err != nil {
		return "", err
	}
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		if v, ok := n.(*parser.VectorSelector); ok {
			v.LabelMatchers = append(v.LabelMatchers, labels.MustNewMatcher(labels.MatchEqual, metricname.Namespace, namespace))
		}
		return nil
	})
	return parsed.String(), nil
}
