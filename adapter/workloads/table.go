package workloads

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

// Table is what one tick found: the answer for every metric and workload, and who asks. Immutable once made: requests
// are look-ups in it.
type Table struct {
	At      time.Time // of the evaluation
	view    *View
	metrics map[string]*Metric // by lower-case name
	names   []string           // sorted
}

// Metric is one rule's answers.
type Metric struct {
	Rule    rules.Rule
	idle    bool                // it was not evaluated, for nobody has asked for it
	entries map[string][]*Entry // by namespace, sorted by workload
}

// Entry is one workload's answer to one metric.
type Entry struct {
	Workload string
	Items    []rules.Item // as the policy gave them
	Err      error        // why there are none; with the workload's name

	fresh    []rules.Item // the values of now, whole or not
	labels   []Labels     // of the workload's pods
	workload *rules.Workload
	per      rules.Per
	model    func(rules.Pod) string
}

// Item is one value with the labels that it is served under.
type Item struct {
	Labels labels.Set // selector-safe
	Value  float64
	At     time.Time
	Held   bool
}

// possible is a label set that is not known in full.
type possible struct {
	labels  labels.Set
	unknown []string // labels that any value could stand for
}

// NewTable makes a table of a view and the answers to each rule, which stand in the order of view.Workloads; a rule without was not
// evaluated. model
// says which GPU model a pod holds, if that is known; it is asked later, too, by any goroutine.
func NewTable(at time.Time, view *View, list []rules.Rule, answers [][]rules.Answer, model func(rules.Pod) string) *Table {
	t := &Table{At: at, view: view, metrics: map[string]*Metric{}}
	for i, rule := range list {
		m := &Metric{Rule: rule, idle: answers[i] == nil, entries: map[string][]*Entry{}}
		for j := range view.Workloads {
			if m.idle {
				break
			}
			w := &view.Workloads[j]
			m.entries[w.Namespace] = append(m.entries[w.Namespace], newEntry(w, view.labels[j], rule.Per, answers[i][j], model))
		}
		name := strings.ToLower(rule.Metric)
		t.metrics[name] = m
		t.names = append(t.names, name)
	}
	slices.Sort(t.names)
	return t
}

func newEntry(w *rules.Workload, of []Labels, per rules.Per, a rules.Answer, model func(rules.Pod) string) *Entry {
	e := &Entry{Workload: w.Name, Items: a.Items, fresh: a.Fresh, labels: of, workload: w, per: per, model: model}
	if a.Err != nil || len(a.Items) == 0 {
		e.Items, e.Err = nil, fmt.Errorf("StatefulSet %s: %w", w.Name, cmp.Or(a.Err, rules.ErrNoPods))
	}
	return e
}

// couldBe says whether a selector could select a worker of a workload in error, by what is known of its workers' labels.
func (e *Entry) couldBe(selector labels.Selector) bool {
	itself := possible{labels.Set{metricname.ItemWorkload: SelectorSafe(e.Workload)}, []string{metricname.ItemHeld}}
	if itself.matches(selector) {
		return true
	}
	return e.per != rules.PerWorkload && slices.ContainsFunc(e.workload.Pods, func(p rules.Pod) bool {
		set := labels.Set{metricname.ItemWorkload: SelectorSafe(e.Workload), metricname.ItemPod: SelectorSafe(p.Name)}
		unknown := []string{metricname.ItemHeld}
		for label, value := range map[string]string{metricname.ItemNode: p.Node, metricname.ItemGPUModel: e.model(p)} {
			if value != "" {
				set[label] = SelectorSafe(value)
			} else {
				unknown = append(unknown, label)
			}
		}
		return possible{set, unknown}.matches(selector)
	})
}

// itemLabels are the labels that an item is served under, made when they are asked for: a table of sets for a large
// fleet would be most of the adapter's memory.
type itemLabels struct {
	workload string
	item     *rules.Item
}

var _ labels.Labels = itemLabels{}

// Lookup implements [labels.Labels]. A label without a value is not there.
func (l itemLabels) Lookup(label string) (value string, exists bool) {
	switch label {
	case metricname.ItemPod:
		value = l.item.Pod
	case metricname.ItemWorkload:
		value = l.workload
	case metricname.ItemNode:
		value = l.item.Node
	case metricname.ItemHeld:
		return strconv.FormatBool(l.item.Held), true
	default:
		value = l.item.Labels[label]
	}
	return SelectorSafe(value), value != ""
}

func (l itemLabels) Has(label string) bool { _, ok := l.Lookup(label); return ok }

func (l itemLabels) Get(label string) string { v, _ := l.Lookup(label); return v }

// set is all of them.
func (l itemLabels) set() labels.Set {
	out := make(labels.Set, 4+len(l.item.Labels))
	put := func(label string) {
		if v, ok := l.Lookup(label); ok {
			out[label] = v
		}
	}
	for label := range l.item.Labels {
		put(label)
	}
	for _, label := range []string{metricname.ItemPod, metricname.ItemWorkload, metricname.ItemNode, metricname.ItemHeld} {
		put(label)
	}
	return out
}

func (l itemLabels) served() Item {
	return Item{l.set(), l.item.Value, l.item.At, l.item.Held}
}

// What a request can be told. Anything else that Lookup returns is the policy's own error of a workload.
var (
	// ErrUnknownMetric: no rule gives that metric.
	ErrUnknownMetric = errors.New("no such metric")
	// ErrAmbiguous: it is not clear which workload is meant, and a selector would say it.
	ErrAmbiguous = errors.New("which workload is meant is not clear")
	// ErrIdle: nobody has asked for the metric for a while, so it was not measured.
	ErrIdle = errors.New("not measured until somebody asks")
	// ErrNothing: nothing in the namespace is meant.
	ErrNothing = errors.New("nothing to measure")
)

// Metrics are the names of all metrics, sorted.
func (t *Table) Metrics() []string { return t.names }

// Entries are the answers to a metric in a namespace, sorted by workload. Do not change them.
func (t *Table) Entries(namespace, metric string) []*Entry {
	if m := t.metrics[strings.ToLower(metric)]; m != nil {
		return m.entries[namespace]
	}
	return nil
}

// Lookup gives the items that a request means, at least one, and the metric's rule. The namespace is a wall: nothing of
// another one is looked at, nor named in an error.
//
// With a selector, the items whose labels it selects are meant; if it selects workers of a workload that is in error,
// that error is the answer, because half of what was asked for would look like a small load. Without one (nil, or one
// that selects everything) it is the workload that the namespace's only HPA scales that asks for this metric without a
// selector; where there is no such HPA, the namespace's only workload.
func (t *Table) Lookup(namespace, metric string, selector labels.Selector) ([]Item, rules.Rule, error) {
	m := t.metrics[strings.ToLower(metric)]
	if m == nil {
		return nil, rules.Rule{}, fmt.Errorf("%w: %q; there are %s", ErrUnknownMetric, metric, strings.Join(t.names, ", "))
	}
	if m.idle {
		return nil, m.Rule, m.idleError(metric)
	}
	entries := m.entries[namespace]
	if selector == nil || selector.Empty() {
		e, err := t.only(namespace, strings.ToLower(metric), entries)
		if err != nil {
			return nil, m.Rule, err
		}
		if e.Err != nil {
			return nil, m.Rule, e.Err
		}
		items := make([]Item, len(e.Items))
		for i := range e.Items {
			items[i] = itemLabels{e.Workload, &e.Items[i]}.served()
		}
		return items, m.Rule, nil
	}

	var items []Item
	var failed []error
	for _, e := range entries {
		if e.Err != nil {
			if e.couldBe(selector) {
				failed = append(failed, e.Err)
			}
			continue
		}
		for i := range e.Items {
			if l := (itemLabels{e.Workload, &e.Items[i]}); selector.Matches(l) {
				items = append(items, l.served())
			}
		}
	}
	switch {
	case len(failed) == 1:
		return nil, m.Rule, failed[0]
	case len(failed) > 1:
		return nil, m.Rule, joined(failed)
	case len(items) == 0:
		return nil, m.Rule, fmt.Errorf("%w: the selector %s selects no worker; %s", ErrNothing, selector, there(entries))
	}
	return items, m.Rule, nil
}

// Pods gives the values of now of the pods that a selector of pods' own labels selects, of any workload, in the order of workloads and
// ordinals, and the metric's rule. A pod whose value is missing is not among them: who asks so (the HPA, for a metric of type Pods) treats
// missing ones himself. At least one, or an error.
func (t *Table) Pods(namespace, metric string, pods, items labels.Selector) ([]PodItem, rules.Rule, error) {
	m := t.metrics[strings.ToLower(metric)]
	switch {
	case m == nil:
		return nil, rules.Rule{}, fmt.Errorf("%w: %q; there are %s", ErrUnknownMetric, metric, strings.Join(t.names, ", "))
	case m.Rule.Per != rules.PerPod:
		return nil, m.Rule, fmt.Errorf("%w: %s is one value for a workload, not one for each pod: ask for it as an external metric", ErrUnknownMetric, metric)
	case m.idle:
		return nil, m.Rule, m.idleError(metric)
	}
	var out []PodItem
	var selected []string
	var why error
	for _, e := range m.entries[namespace] {
		meant := 0
		fresh := map[string]*rules.Item{} // by pod UID
		for i := range e.fresh {
			fresh[e.fresh[i].PodUID] = &e.fresh[i]
		}
		for i, p := range e.workload.Pods {
			if !pods.Matches(podLabels{p.Name, e.labels[i]}) {
				continue
			}
			selected, meant = append(selected, p.Name), meant+1
			if item := fresh[p.UID]; item != nil {
				if l := (itemLabels{e.Workload, item}); items.Empty() || items.Matches(l) {
					out = append(out, PodItem{p.Name, l.served()})
				}
			}
		}
		if meant > 0 && e.Err != nil {
			why = cmp.Or(why, e.Err)
		}
	}
	switch {
	case len(out) > 0:
		return out, m.Rule, nil
	case why != nil:
		return nil, m.Rule, why
	case len(selected) == 0:
		return nil, m.Rule, fmt.Errorf("%w: the selector %s selects no pod of a workload with GPUs; %s", ErrNothing, pods, there(m.entries[namespace]))
	default:
		return nil, m.Rule, fmt.Errorf("%w: none of the selected pods has a value now: %s", rules.ErrMissing, strings.Join(selected, ", "))
	}
}

// PodItem is a value of one pod.
type PodItem struct {
	Pod string
	Item
}

// idleError says what happens now that somebody has asked.
func (m *Metric) idleError(metric string) error {
	return fmt.Errorf("%w for %s; it is measured from now on: ask again in %s", ErrIdle, metric, m.Rule.Window)
}

// only finds the workload that a request without selector means.
func (t *Table) only(namespace, metric string, entries []*Entry) (*Entry, error) {
	var askers []HPA
	for _, h := range t.view.hpas[namespace] {
		if slices.ContainsFunc(h.Asks, func(a Ask) bool { return a.Metric == metric && a.Selector == nil }) {
			askers = append(askers, h)
		}
	}
	if len(askers) == 0 {
		switch len(entries) {
		case 0:
			return nil, fmt.Errorf("%w: no StatefulSet in this namespace has pods with GPUs", ErrNothing)
		case 1:
			return entries[0], nil
		}
		return nil, fmt.Errorf("%w: %s, and no HorizontalPodAutoscaler asks for %s; name one with a selector, such as %s=%s",
			ErrAmbiguous, there(entries), metric, metricname.ItemWorkload, SelectorSafe(entries[0].Workload))
	}
	target := askers[0]
	same := func(h HPA) bool { return h.TargetKind == target.TargetKind && h.TargetName == target.TargetName }
	if !all(askers, same) {
		var who []string
		for _, h := range askers {
			who = append(who, fmt.Sprintf("%s (scales %s)", h.Name, h.TargetName))
		}
		return nil, fmt.Errorf("%w: %s HorizontalPodAutoscalers, %s, ask for %s without a selector; add to each its own, such as selector: {matchLabels: {%s: %s}}",
			ErrAmbiguous, count(len(askers)), strings.Join(who, " and "), metric, metricname.ItemWorkload, SelectorSafe(target.TargetName))
	}
	if target.TargetKind != kindStatefulSet {
		return nil, fmt.Errorf("%w: HorizontalPodAutoscaler %s scales %s %s, but only a StatefulSet is a workload",
			ErrNothing, target.Name, target.TargetKind, target.TargetName)
	}
	i, found := slices.BinarySearchFunc(entries, target.TargetName, func(e *Entry, name string) int { return cmp.Compare(e.Workload, name) })
	if !found {
		return nil, fmt.Errorf("%w: HorizontalPodAutoscaler %s scales StatefulSet %s, which does not exist", ErrNothing, target.Name, target.TargetName)
	}
	return entries[i], nil
}

// matches says whether the selector could select it, whatever the unknown labels are.
func (p possible) matches(selector labels.Selector) bool {
	requirements, selectable := selector.Requirements()
	if !selectable {
		return false
	}
	for _, r := range requirements {
		if !slices.Contains(p.unknown, r.Key()) && !r.Matches(p.labels) {
			return false
		}
	}
	return true
}

// there says in words which workloads a namespace has.
func there(entries []*Entry) string {
	const most = 10
	var names []string
	for _, e := range entries {
		if len(names) == most {
			names = append(names, fmt.Sprintf("and %d more", len(entries)-most))
			break
		}
		names = append(names, e.Workload)
	}
	if len(names) == 0 {
		return "this namespace has no workload"
	}
	return fmt.Sprintf("the workloads of this namespace: %s", strings.Join(names, ", "))
}

func joined(list []error) error {
	texts := make([]string, len(list))
	for i, err := range list {
		texts[i] = err.Error()
	}
	return errors.New(strings.Join(texts, "; "))
}

func all[T any](list []T, f func(T) bool) bool {
	return !slices.ContainsFunc(list, func(v T) bool { return !f(v) })
}

func count(n int) string {
	if n == 2 {
		return "two"
	}
	return fmt.Sprint(n)
}
