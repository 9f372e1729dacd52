package ruletest

import (
	"cmp"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/document"
)

// apiVersion and kind of a test file.
const (
	apiVersion = "capstan.dev/v1alpha1"
	kind       = "RuleTests"
)

// longest is how long a test may be. At a tick a second it takes some seconds to run.
const longest = 24 * time.Hour

// Parse reads a test file. Unknown fields are wrong; everything that is wrong is said at once.
func Parse(name string, data []byte) (File, []document.Problem) {
	f := File{Name: name}
	problems := document.Read(name, data, f.read)
	if document.Refused(problems) != nil {
		return File{}, problems
	}
	return f, problems
}

func (f *File) read(root document.Node) {
	fields, ok := root.Fields("apiVersion", "kind", "rules", "interval", "tests")
	if !ok {
		return
	}
	fields["apiVersion"].Is(apiVersion)
	fields["kind"].Is(kind)
	if rules := fields["rules"]; !rules.Missing {
		f.Rules = rules.Text("the name of a rule file beside this one, or leave the field out for the built-in rules")
	}
	f.Interval = fields["interval"].Duration(5*time.Second, time.Second, time.Minute)
	names := map[string]bool{}
	for _, n := range fields["tests"].AtLeastOne("a list of at least one test") {
		t, name := f.test(n)
		if names[t.Name] {
			name.Fail("%q is already the name of a test: give one of them another", t.Name)
		}
		names[t.Name] = t.Name != ""
		f.Tests = append(f.Tests, t)
	}
}

// test reads one test, and returns the node of its name, too.
func (f *File) test(n document.Node) (Test, document.Node) {
	t := Test{Line: n.Line()}
	fields, ok := n.Fields("name", "metric", "namespace", "workload", "states", "series", "expect")
	name := fields["name"]
	if !ok {
		return t, name
	}
	t.Name = name.Text("what the test shows, in a few words")
	workload := rules.Workload{Namespace: "default", Name: "worker"}
	if v := fields["namespace"]; !v.Missing {
		workload.Namespace = v.Text("the workload's namespace")
	}
	if v := fields["workload"]; !v.Missing {
		workload.Name = v.Text("the StatefulSet's name")
	}
	workload.UID = "uid-of-" + workload.Name
	pods := map[string][]rules.Pod{} // by name, of different UIDs
	t.states = f.statesOf(fields["states"], workload, pods)
	for _, s := range fields["series"].Items() {
		t.series = append(t.series, seriesOf(s, workload.Namespace, pods)...)
	}
	metric := ""
	if v := fields["metric"]; !v.Missing {
		metric = v.Text("the metric that the HPA asks for")
	}
	for _, e := range fields["expect"].AtLeastOne("a list of at least one moment and what the HPA gets then") {
		t.expect = append(t.expect, f.expectationOf(e, metric))
	}
	slices.SortStableFunc(t.expect, func(a, b expectation) int { return cmp.Compare(a.at, b.at) })
	return t, name
}

// moment reads a time since the test's start at which there is a tick.
func (f *File) moment(n document.Node) time.Duration {
	at := n.Duration(0, 0, longest)
	if at%f.Interval != 0 {
		n.Fail("%s is between two ticks of %s: write %s or %s", document.Short(at), document.Short(f.Interval),
			document.Short(at.Truncate(f.Interval)), document.Short(at.Truncate(f.Interval)+f.Interval))
	}
	return at
}

// statesOf reads what becomes of the workload, and notes its pods.
func (f *File) statesOf(n document.Node, workload rules.Workload, pods map[string][]rules.Pod) (states []state) {
	type pod struct {
		rules.Pod
		readySince time.Duration
	}
	var before []pod
	last := time.Duration(-1)
	for _, n := range n.AtLeastOne("a list of the workload's pods from a moment on") {
		fields, ok := n.Fields("at", "ended", "pods")
		if !ok {
			continue
		}
		at := f.moment(fields["at"])
		switch {
		case last < 0 && at > 0:
			fields["at"].Fail("%s is not the test's start: write 0s in the first state, or leave it out", document.Short(at))
		case at <= last:
			fields["at"].Fail("%s is not after the state before, which is at %s: write a later one", document.Short(at), document.Short(last))
		}
		last = max(last, at)
		ended := ""
		if v := fields["ended"]; !v.Missing {
			ended = v.Text("how the job ended, such as succeeded, or leave the field out")
		}
		if fields["pods"].Missing {
			fields["pods"].Fail("it is missing: write the pods' names, or [] for none")
		}
		var now []pod
		for _, n := range fields["pods"].Items() {
			p := pod{readySince: at}
			var since document.Node
			p.Pod, since = podOf(n)
			if i := slices.IndexFunc(before, func(b pod) bool { return b.UID == p.UID && b.Ready == p.Ready }); i >= 0 {
				p.readySince = before[i].readySince
			}
			p.readySince = since.Duration(p.readySince, -longest, longest)
			if slices.ContainsFunc(now, func(other pod) bool { return other.UID == p.UID }) {
				n.Fail("pod %s with the UID %s is there twice: leave one out, or give it another uid", p.Name, p.UID)
			}
			now = append(now, p)
			if !slices.ContainsFunc(pods[p.Name], func(o rules.Pod) bool { return o.UID == p.UID }) {
				pods[p.Name] = append(pods[p.Name], p.Pod)
			}
		}
		before = now
		states = append(states, state{at, func(start time.Time) rules.Workload {
			w := workload
			w.Ended = ended
			for _, p := range now {
				p.ReadySince = start.Add(p.readySince)
				w.Pods = append(w.Pods, p.Pod)
			}
			return w
		}})
	}
	return states
}

var phases = []string{"Pending", "Running", "Succeeded", "Failed", "Unknown"}

// podOf reads a pod: its name, or a mapping for one that is not just Ready and holding a GPU. It returns the node of readySince, too.
func podOf(n document.Node) (p rules.Pod, readySince document.Node) {
	p = rules.Pod{Phase: "Running", Ready: true, GPUs: 1}
	readySince = document.Node{Missing: true}
	if n.IsScalar() {
		p.Name = n.Text("the pod's name")
		p.UID = p.Name
		return p, readySince
	}
	fields, ok := n.Fields("name", "uid", "node", "phase", "ready", "readySince", "terminating", "gpus")
	if !ok {
		return p, readySince
	}
	p.Name = fields["name"].Text("the pod's name")
	p.UID = p.Name
	if v := fields["uid"]; !v.Missing {
		p.UID = v.Text("the pod's UID, or leave the field out for the name")
	}
	if v := fields["node"]; !v.Missing {
		p.Node = v.Text("the node's name")
	}
	p.Phase = fields["phase"].OneOf(p.Phase, phases...)
	p.Ready = fields["ready"].Bool(p.Phase == "Running")
	p.Terminating = fields["terminating"].Bool(false)
	p.GPUs = fields["gpus"].Int(1, 0, 1024)
	return p, fields["readySince"]
}

// tooMany finds a repetition of more than 99,999 values, which PromQL's parser would all make.
var tooMany = regexp.MustCompile(`x\s*[0-9_]{6,}`)

// seriesOf reads a series in promtool's notation: one, or one for each pod that it names, with the labels that the exporter and the
// adapter give to a pod's series.
func seriesOf(n document.Node, namespace string, pods map[string][]rules.Pod) (list []series) {
	fields, ok := n.Fields("series", "pods", "values")
	if !ok {
		return nil
	}
	name := fields["series"].Text("a series, such as " + metricname.PodGPUBusySeconds)
	text := fields["values"].Text("its values at each tick, such as 0+4x60: 0, 4, 8, and so on, 61 of them")
	if name == "" || text == "" {
		return nil
	}
	if tooMany.MatchString(text) {
		fields["values"].Fail("there are more than 99999 repetitions: write fewer")
		return nil
	}
	p := parser.NewParser(parser.Options{})
	metric, err := p.ParseMetric(name)
	if err == nil {
		_, err = collect.Decode([]byte(series{labels: metric}.line(0)), "", start, nil, 1)
	}
	if err != nil || !model.LegacyValidation.IsValidMetricName(metric.Get(model.MetricNameLabel)) {
		fields["series"].Fail("%q is no series: write one like %s{pod_uid=\"a\"}", name, metricname.PodGPUBusySeconds)
		return nil
	}
	alone, values, err := p.ParseSeriesDesc("x " + text)
	if err != nil || alone.Len() != 1 {
		fields["values"].Fail("%q are no values: write them like 1 2 _ stale, or 0+4x60 for 0, 4, 8 and so on", text)
		return nil
	}
	if slices.ContainsFunc(values, func(v parser.SequenceValue) bool {
		return v.Histogram != nil || math.IsInf(v.Value, 0) || math.IsNaN(v.Value) && !value.IsStaleNaN(v.Value)
	}) {
		fields["values"].Fail("there is something among them that the adapter does not take from an exporter: write finite numbers")
		return nil
	}
	if fields["pods"].Missing {
		return []series{{metric, values}}
	}
	for _, n := range fields["pods"].AtLeastOne("the names of pods that report this series") {
		switch name := n.Text("a pod's name"); len(pods[name]) {
		case 1:
			p := pods[name][0]
			b := labels.NewBuilder(metric)
			for label, value := range map[string]string{metricname.Namespace: namespace, metricname.Pod: p.Name, metricname.PodUID: p.UID, metricname.ItemNode: p.Node} {
				b.Set(label, value)
			}
			list = append(list, series{b.Labels(), values})
		case 0:
			n.Fail("no state has a pod %q: write one of %s", name, strings.Join(slices.Sorted(maps.Keys(pods)), ", "))
		default:
			n.Fail("pod %s has several UIDs: leave it out here, and write a series with the labels namespace, pod and pod_uid for each", name)
		}
	}
	return list
}

func (f *File) expectationOf(n document.Node, metric string) expectation {
	e := expectation{line: n.Line(), column: n.Column(), metric: metric}
	fields, ok := n.Fields("at", "metric", "items", "error")
	if !ok {
		return e
	}
	if fields["at"].Missing {
		fields["at"].Fail("it is missing: write the time since the test's start, such as 60s")
	}
	e.at = f.moment(fields["at"])
	if v := fields["metric"]; !v.Missing {
		e.metric = v.Text("the metric that the HPA asks for")
	}
	switch items, err := fields["items"], fields["error"]; {
	case items.Missing == err.Missing:
		n.Fail("an HPA gets items or an error: write one of both")
	case items.Missing:
		e.err = err.Text("a part of the error's text")
	default:
		names, values := items.Entries()
		for i, name := range names {
			e.items = append(e.items, itemOf(name, values[i]))
		}
		if len(e.items) == 0 {
			items.Fail("there is none, but an HPA gets at least one or an error: write POD: VALUE, or error instead of items")
		}
	}
	return e
}

// itemOf reads VALUE or VALUE held.
func itemOf(name string, n document.Node) item {
	text := n.Text("a number, and held if it is an older one that still stands")
	number, held := strings.CutSuffix(text, " held")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if text != "" && (err != nil || !(v >= 0 && v <= 1e12)) {
		n.Fail("%q is no value that is ever served: write a number from 0 on, and held if it is an older one that still stands", text)
		v = 0
	}
	return item{name, int64(math.Round(v * 1000)), held}
}
