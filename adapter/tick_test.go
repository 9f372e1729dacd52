package adapter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

func rule() rules.Rule {
	return rules.Rule{
		Metric: "gpu_utilization", Help: "Busy share of a worker's GPUs.", Unit: rules.Percent,
		Expr:   "100 * rate(" + metricname.PodGPUBusySeconds + "[$window]) / rate(" + metricname.PodGPUObservedSeconds + "[$window])",
		Window: 30 * time.Second, Freshness: metricname.PodGPUObservedSeconds, MaxAge: 15 * time.Second,
		Missing: rules.Hold, HoldFor: 60 * time.Second, JoinFor: 60 * time.Second, Per: rules.PerPod,
	}
}

// fleet is exporters whose GPUs are busy as told, and the API server's view of their pods.
type fleet struct {
	start time.Time
	nodes map[string]*fakeNode
	sets  []workloads.StatefulSet
	pods  []workloads.Pod
	hpas  []workloads.HPA

	mu       sync.Mutex     // protects requests
	requests map[string]int // by family
}

type fakeNode struct {
	busy   map[string]float64 // share by pod UID; a pod that the node claims need not be its own
	dead   bool
	frozen time.Time // when it stopped to move; zero = it moves
	skew   time.Duration
	rings  map[string]*trainer // by pod UID
}

// trainer is what a pod's stats page says.
type trainer struct {
	generation int
	began      time.Time
	stuck      time.Time // since when it does no step; zero = one each second
}

func (f *fleet) targets() []collect.Target {
	var out []collect.Target
	for name := range f.nodes {
		out = append(out, collect.Target{ID: name, Node: name, URL: "http://" + name + "/metrics"})
	}
	return out
}

func (f *fleet) view(metrics []string) *workloads.View {
	return workloads.Build(f.hpas, f.sets, slices.Clone(f.pods), metrics)
}

// RoundTrip renders a node's page.
func (f *fleet) RoundTrip(r *http.Request) (*http.Response, error) {
	n := f.nodes[r.URL.Host]
	if n == nil || n.dead {
		return nil, errors.New("connection refused")
	}
	f.mu.Lock()
	for _, name := range r.URL.Query()["name[]"] {
		f.requests[name]++
	}
	f.mu.Unlock()
	now := time.Now().Add(n.skew)
	if !n.frozen.IsZero() {
		now = n.frozen
	}
	seconds := now.Sub(f.start).Seconds()
	var b bytes.Buffer
	fmt.Fprintf(&b, "process_start_time_seconds 1\n%s %f\n", metricname.SnapshotTimestamp, float64(now.UnixNano())/1e9)
	for uid, share := range n.busy {
		l := fmt.Sprintf("{namespace=%q,pod=%q,pod_uid=%q,shared=\"false\"}", "ns", "pod-"+uid, uid)
		fmt.Fprintf(&b, "%s%s 1\n", metricname.PodGPUs, l)
		fmt.Fprintf(&b, "%s%s %f\n%s%s %f\n", metricname.PodGPUBusySeconds, l, share*seconds, metricname.PodGPUObservedSeconds, l, seconds)
		fmt.Fprintf(&b, "%s{uuid=%q,model=\"NVIDIA H200\"} 1\n%s{uuid=%q,pod_uid=%q} 1\n", metricname.GPUInfo, "GPU-"+uid, metricname.GPUAllocationInfo, "GPU-"+uid, uid)
	}
	for uid, r := range n.rings {
		until := now
		if !r.stuck.IsZero() {
			until = r.stuck
		}
		l := fmt.Sprintf("{namespace=%q,pod=%q,pod_uid=%q}", "ns", "pod-"+uid, uid)
		fmt.Fprintf(&b, "%s%s %d\n%s%s %f\n%s%s %f\n%s%s 1\n", metricname.TrainingGeneration, l, r.generation, metricname.TrainingGenerationAge, l, now.Sub(r.began).Seconds(),
			metricname.TrainingSteps, l, math.Floor(until.Sub(f.start).Seconds()), metricname.TrainingStepDuration, l)
	}
	return &http.Response{StatusCode: 200, Status: "200 OK", Body: io.NopCloser(&b)}, nil
}

// job makes a workload of ready pods, the i-th on node-i.
func (f *fleet) job(namespace, name string, ready time.Time, shares ...float64) {
	f.sets = append(f.sets, workloads.StatefulSet{Namespace: namespace, Name: name, UID: namespace + "/" + name, GPUs: 1})
	f.hpas = append(f.hpas, workloads.HPA{Namespace: namespace, Name: name + "-hpa", TargetKind: "StatefulSet", TargetName: name, Asks: []workloads.Ask{{Metric: "gpu_utilization"}}})
	for i, share := range shares {
		node, uid := fmt.Sprintf("node-%d", i), fmt.Sprintf("%s-%s-%d", namespace, name, i)
		f.pods = append(f.pods, workloads.Pod{Namespace: namespace, Owner: namespace + "/" + name, Pod: rules.Pod{
			UID: uid, Name: fmt.Sprintf("%s-%d", name, i), Node: node, Phase: "Running", Ready: true, ReadySince: ready, GPUs: 1}})
		if f.nodes[node] == nil {
			f.nodes[node] = &fakeNode{busy: map[string]float64{}}
		}
		f.nodes[node].busy[uid] = share
	}
}

type rig struct {
	*fleet
	*loop
	log bytes.Buffer
}

// asked says how often exporters were asked for a family.
func (f *fleet) asked(family string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests[family]
}

// start runs a loop in a bubble until the test ends.
func start(t *testing.T, f *fleet, list ...rules.Rule) *rig {
	t.Helper()
	r := &rig{fleet: f}
	cfg := Config{Rules: list, Interval: 5 * time.Second, Transport: f, Registry: prometheus.NewRegistry(), Version: "test",
		Logger: slog.New(slog.NewTextHandler(&r.log, nil))}
	l, err := newLoop(cfg, f.targets, f.view)
	if err != nil {
		t.Fatal(err)
	}
	registerRest(cfg, l, nil)
	l.events = newEvents(nil, cfg.Logger, cfg.Registry)
	r.loop = l
	return r
}

// said are the events that were queued since the last call.
func (r *rig) said() (texts []string) {
	for {
		select {
		case e := <-r.events.queue:
			texts = append(texts, fmt.Sprintf("%s %s on %s %s/%s: %s", e.Type, e.Reason, e.InvolvedObject.Kind, e.Namespace, e.InvolvedObject.Name, e.Message))
		default:
			return texts
		}
	}
}

// run makes ticks for d.
func (r *rig) run(t *testing.T, d time.Duration) {
	t.Helper()
	for range d / r.cfg.Interval {
		r.tick(t.Context(), time.Now())
		time.Sleep(r.cfg.Interval)
	}
}

// get is what an HPA without a selector reads: its pods' values, rounded, with h for held ones; or the error.
func (r *rig) get(namespace, selector string) string {
	s, err := labels.Parse(selector)
	if err != nil {
		return err.Error()
	}
	items, _, err := r.table.Load().Lookup(namespace, "gpu_utilization", s)
	if err != nil {
		return "error: " + err.Error()
	}
	var out []string
	for _, it := range items {
		held := ""
		if it.Held {
			held = "h"
		}
		out = append(out, fmt.Sprintf("%s=%.0f%s", it.Labels["pod"], it.Value, held))
	}
	return strings.Join(out, " ")
}

func newFleet() *fleet {
	return &fleet{start: time.Now().Add(-time.Hour), nodes: map[string]*fakeNode{}, requests: map[string]int{}}
}

// TestTick tells the story of a job: measured, an exporter lost, held, failed, back.
func TestTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.job("ns", "job", time.Now().Add(-10*time.Minute), 0.95, 0.5)
		r := start(t, f, rule())
		want := func(what, want string) {
			t.Helper()
			if got := r.get("ns", ""); got != want {
				t.Errorf("%s: got %s\nwant %s", what, got, want)
			}
		}
		if err := r.ready(time.Now()); err == nil {
			t.Error("ready before the first tick")
		}
		if err := r.alive(time.Now().Add(time.Hour)); err != nil {
			t.Errorf("before the first tick: %v", err)
		}
		r.run(t, 45*time.Second)
		want("measured", "job-0=95 job-1=50")
		if err := errors.Join(r.ready(time.Now().Add(time.Minute)), r.alive(time.Now())); err != nil {
			t.Error(err)
		}
		if err := r.ready(time.Now().Add(-30 * time.Second)); err == nil || !strings.Contains(err.Error(), "of the longest window") {
			t.Errorf("ready before a whole window: %v", err)
		}
		if err := r.alive(time.Now().Add(time.Minute)); err == nil {
			t.Error("alive a minute after the newest tick")
		}
		items, _, err := r.table.Load().Lookup("ns", "gpu_utilization", nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(labels.Set{"pod": "job-0", "workload": "job", "node": "node-0", "gpu_model": "NVIDIA-H200", "held": "false"}, items[0].Labels); diff != "" {
			t.Errorf("labels (-want +got)\n%s", diff)
		}
		if err := testutil.GatherAndCompare(r.cfg.Registry, strings.NewReader(`
# HELP capstan_adapter_workload_pods Pods of a workload: ready with a GPU, reporting a value, or with a held one.
# TYPE capstan_adapter_workload_pods gauge
capstan_adapter_workload_pods{metric="gpu_utilization",namespace="ns",state="held",workload="job"} 0
capstan_adapter_workload_pods{metric="gpu_utilization",namespace="ns",state="ready",workload="job"} 2
capstan_adapter_workload_pods{metric="gpu_utilization",namespace="ns",state="reporting",workload="job"} 2
# HELP capstan_adapter_workload_signal 1 = the HorizontalPodAutoscaler that asks for this workload's metric gets values, 0 = it gets an error.
# TYPE capstan_adapter_workload_signal gauge
capstan_adapter_workload_signal{metric="gpu_utilization",namespace="ns",workload="job"} 1
`), "capstan_adapter_workload_pods", "capstan_adapter_workload_signal"); err != nil {
			t.Error(err)
		}
		if problems, err := testutil.GatherAndLint(r.cfg.Registry); err != nil || len(problems) > 0 {
			t.Errorf("lint: %v %v", problems, err)
		}

		// The exporter of job-1 is gone: its last value stands for a while, then there is an error that names it. Never 0.
		f.nodes["node-1"].dead = true
		r.run(t, 30*time.Second)
		if got := r.get("ns", ""); !strings.Contains(got, "job-1=50h") {
			t.Errorf("30 s after the loss: %s", got)
		}
		r.run(t, 60*time.Second)
		if got := r.get("ns", ""); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, "job-1") {
			t.Errorf("90 s after the loss: %s", got)
		}
		f.nodes["node-1"].dead = false
		r.run(t, 45*time.Second)
		want("back", "job-0=95 job-1=50")
		for _, line := range []string{"a workload has no signal", "a workload has its signal", "an exporter brings nothing", "an exporter is back"} {
			if n := strings.Count(r.log.String(), line); n == 0 || n > 3 {
				t.Errorf("%q is logged %d times:\n%s", line, n, &r.log)
			}
		}

		if got := strings.Join(r.said(), "\n"); !strings.Contains(got, "Warning MetricLost on StatefulSet ns/job: gpu_utilization: missing: worker job-1 on node-1") || !strings.Contains(got, "Normal MetricFound on StatefulSet ns/job: gpu_utilization has values again.") || strings.Count(got, "\n") != 1 {
			t.Errorf("events, want one of the loss and one of the return:\n%s", got)
		}

		// It freezes: the same, though it answers 200.
		f.nodes["node-1"].frozen = time.Now()
		r.run(t, 90*time.Second)
		if got := r.get("ns", ""); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, "job-1") {
			t.Errorf("90 s frozen: %s", got)
		}
		f.nodes["node-1"].frozen = time.Time{}
		r.run(t, 45*time.Second)
		want("thawed", "job-0=95 job-1=50")

		// Its clock is an hour ahead: nothing to see.
		f.nodes["node-1"].skew = time.Hour
		r.run(t, 60*time.Second)
		want("skewed", "job-0=95 job-1=50")

		// The StatefulSet is deleted.
		f.sets, f.pods = nil, nil
		r.run(t, 5*time.Second)
		if got := r.get("ns", ""); !strings.Contains(got, "does not exist") {
			t.Errorf("without the StatefulSet: %s", got)
		}
		if len(r.memory) != 0 || len(r.lost) != 0 {
			t.Errorf("%d memories and %d states of a workload that is gone", len(r.memory), len(r.lost))
		}
	})
}

// TestTickRing: the vector follows the ring's generation, and a ring that stands still has none, though its GPUs are busy.
func TestTickRing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.job("ns", "job", time.Now().Add(-10*time.Minute), 0.95, 0.5)
		form := func(generation int) {
			for i := range 2 {
				f.nodes[fmt.Sprintf("node-%d", i)].rings = map[string]*trainer{fmt.Sprintf("ns-job-%d", i): {generation: generation, began: time.Now()}}
			}
		}
		form(1)
		r := start(t, f, rule())
		want := func(what, want string) {
			t.Helper()
			if got := r.get("ns", ""); !strings.HasPrefix(got, want) {
				t.Errorf("%s: got %s\nwant %s", what, got, want)
			}
		}
		r.run(t, 45*time.Second)
		want("measured", "job-0=95 job-1=50")
		form(2)
		r.run(t, 15*time.Second)
		want("just after a change of the ring, with the same members", "job-0=95h job-1=50h")
		r.run(t, 30*time.Second)
		want("a window later", "job-0=95 job-1=50")

		// A stranger's exporter says that the ring went on without job-1.
		f.nodes["stranger"] = &fakeNode{rings: map[string]*trainer{"ns-job-0": {generation: 9, began: time.Now()}}}
		r.run(t, 15*time.Second)
		want("an exporter speaks for its own node's pods", "job-0=95 job-1=50")

		for i := range 2 {
			f.nodes[fmt.Sprintf("node-%d", i)].rings[fmt.Sprintf("ns-job-%d", i)].stuck = time.Now()
		}
		r.run(t, 50*time.Second)
		want("quiet for less than a minute", "job-0=95 job-1=50")
		r.run(t, 20*time.Second)
		want("hung", "error: StatefulSet job: ring not stepping: none of its 2 members")
		form(3)
		r.run(t, 45*time.Second)
		want("it steps again", "job-0=95 job-1=50")

		f.sets[0].Ended = "succeeded"
		r.run(t, 5*time.Second)
		want("ended", "error: StatefulSet job: the job is done: succeeded")
	})
}

// TestTickDemand: a metric that nobody asks for is not measured. Who asks is told so, and it is, for as long as somebody goes on asking; an
// HPA that asks for it need not have asked before.
func TestTickDemand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.job("ns", "job", time.Now().Add(-10*time.Minute), 0.95, 0.5)
		extra := rule()
		extra.Metric, extra.Collect = "observed_share", rules.Asked
		extra.Expr = "rate(" + metricname.PodGPUObservedSeconds + "[$window]) + 0 * capstan_pod_gpus"
		r := start(t, f, rule(), extra)
		get := func() string {
			t.Helper()
			r.Ask("observed_share") // as a request does
			items, _, err := r.table.Load().Lookup("ns", "observed_share", labels.SelectorFromSet(labels.Set{"workload": "job"}))
			if err != nil {
				return err.Error()
			}
			return fmt.Sprint(len(items), " values")
		}
		want := func(what, want string) {
			t.Helper()
			if got := get(); !strings.Contains(got, want) {
				t.Errorf("%s: got %s\nwant %s", what, got, want)
			}
		}
		r.run(t, 45*time.Second)
		if n := r.asked("capstan_pod_gpus"); n != 0 {
			t.Errorf("exporters were asked %d times for what nobody asks for", n)
		}
		if got := r.get("ns", ""); got != "job-0=95 job-1=50" {
			t.Errorf("the other metric: %s", got)
		}
		want("asked for the first time", "not measured until somebody asks for observed_share; it is measured from now on: ask again in 30s")
		r.run(t, 10*time.Second)
		want("asked again too early", "collecting")
		r.run(t, 40*time.Second)
		want("a window later", "2 values")
		r.run(t, 10*time.Minute+10*time.Second)
		want("after ten minutes in which nobody asked", "not measured until somebody asks")
		r.run(t, 45*time.Second)
		want("asked again", "2 values")

		f.hpas = append(f.hpas, workloads.HPA{Namespace: "ns", Name: "b", TargetKind: "StatefulSet", TargetName: "job", Asks: []workloads.Ask{{Metric: "observed_share"}}})
		r.run(t, 20*time.Minute)
		want("there is an HPA that asks for it", "2 values")
	})
}

// TestTickReload: new rules are taken while it runs, and what was known of a metric that is made otherwise is forgotten. Rules that cannot
// be taken leave the old ones, and that is said once, in the log, in an event and in a metric.
func TestTickReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.job("ns", "job", time.Now().Add(-10*time.Minute), 0.95, 0.5)
		r := start(t, f, rule())
		list, failure := []rules.Rule{rule()}, error(nil)
		r.cfg.Reload = func() ([]rules.Rule, error) { return list, failure }
		r.cfg.Namespace, r.cfg.Pod = "capstan-system", "adapter-0"
		failed := func() float64 { return testutil.ToFloat64(r.loop.metrics.reloadFailed) }
		r.run(t, 45*time.Second)
		want := func(what, want string) {
			t.Helper()
			if got := r.get("ns", ""); got != want {
				t.Errorf("%s: got %s\nwant %s", what, got, want)
			}
		}
		want("before", "job-0=95 job-1=50")
		if strings.Contains(r.log.String(), "the rules have changed") {
			t.Errorf("the same rules are logged as a change:\n%s", &r.log)
		}

		failure = errors.New("rules.yaml:3:1: rules[0].window: too short")
		r.run(t, 30*time.Second)
		want("the new rules are bad", "job-0=95 job-1=50")
		if n := strings.Count(r.log.String(), "the rules cannot be reloaded"); n != 1 || failed() != 1 {
			t.Errorf("logged %d times, the metric says %v:\n%s", n, failed(), &r.log)
		}
		if got := strings.Join(r.said(), "\n"); got != "Warning RulesNotReloaded on Pod capstan-system/adapter-0: the rules that were there stand: rules.yaml:3:1: rules[0].window: too short" {
			t.Errorf("events: %s", got)
		}

		fifth := rule()
		fifth.Expr = strings.Replace(fifth.Expr, "100", "20", 1)
		other := rule()
		other.Metric, other.Window, other.HoldFor = "long", 2*time.Minute, 3*time.Minute
		list, failure = []rules.Rule{fifth, other}, nil
		r.run(t, 5*time.Second)
		if got := r.get("ns", ""); !strings.Contains(got, "collecting") {
			t.Errorf("with another expression, at once: %s", got)
		}
		r.run(t, 30*time.Second)
		want("with another expression, a window later", "job-0=19 job-1=10")
		if failed() != 0 {
			t.Error("the metric still says that the rules are bad")
		}
		r.run(t, 120*time.Second)
		if items, _, err := r.table.Load().Lookup("ns", "long", labels.SelectorFromSet(labels.Set{"workload": "job"})); err != nil || len(items) != 2 {
			t.Errorf("the new metric, whose window is longer than all before: %v, %v", items, err)
		}
		list = []rules.Rule{other}
		r.run(t, 5*time.Second)
		if got := r.get("ns", ""); !strings.Contains(got, "there are long") {
			t.Errorf("without its rule: %s", got)
		}
		for k := range r.memory {
			if k.metric != "long" {
				t.Errorf("memory of %s, whose rule is gone", k.metric)
			}
		}
	})
}

// TestTickForgery: an exporter speaks for the pods of its own node, and for no other.
func TestTickForgery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		f.job("ns", "job", time.Now().Add(-10*time.Minute), 0.95, 0.5)
		f.nodes["node-0"].busy["ns-job-1"] = 0.01 // node-0 claims the pod of node-1
		r := start(t, f, rule())
		r.run(t, 45*time.Second)
		if got := r.get("ns", ""); got != "job-0=95 job-1=50" {
			t.Errorf("got %s", got)
		}
		if n := testutil.ToFloat64(r.loop.metrics.discarded.WithLabelValues("gpu_utilization", "node")); n == 0 {
			t.Error("the forgery is not counted")
		}
	})
}

// TestTickByNamespace: data on which the rule's query fails costs only its own namespace the signal.
func TestTickByNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		ready := time.Now().Add(-10 * time.Minute)
		f.job("ns", "job", ready, 0.95)
		f.job("bad", "job", ready, 0.5)
		rule := rule()
		// A join that finds two series for one pod: rendered below for namespace bad only.
		rule.Expr = "100 * rate(" + metricname.PodGPUBusySeconds + "[$window]) / on (pod_uid) group_left rate(" + metricname.PodGPUObservedSeconds + "[$window])"
		r := start(t, f, rule)
		r.cfg.Transport = nil
		r.collector = collect.New(collect.Config{Store: r.store, Logger: r.cfg.Logger, Transport: twice{f}})
		r.run(t, 45*time.Second)
		if got := r.get("ns", ""); got != "job-0=95" {
			t.Errorf("ns: %s", got)
		}
		if got := r.get("bad", ""); !strings.HasPrefix(got, "error: ") {
			t.Errorf("bad: %s", got)
		}
		if n := strings.Count(r.log.String(), "trying namespace by namespace"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, &r.log)
		}
	})
}

// twice renders pages with the right namespaces, and a second series for pods of namespace bad.
type twice struct{ inner http.RoundTripper }

func (w twice) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := w.inner.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for line := range strings.Lines(string(page)) {
		if strings.Contains(line, `pod_uid="bad-`) {
			line = strings.Replace(line, `namespace="ns"`, `namespace="bad"`, 1)
			if strings.HasPrefix(line, metricname.PodGPUObservedSeconds) {
				out.WriteString(strings.Replace(line, `shared="false"`, `shared="true"`, 1))
			}
		}
		out.WriteString(line)
	}
	resp.Body = io.NopCloser(&out)
	return resp, nil
}

func TestFamilies(t *testing.T) {
	got, err := Families([]rules.Rule{rule()})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(collect.Families{metricname.PodGPUBusySeconds: true, metricname.PodGPUObservedSeconds: true}, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	any := rule()
	any.Expr = `{__name__=~"capstan_.*"}`
	if got, err := Families([]rules.Rule{rule(), any}); got != nil || err != nil {
		t.Errorf("a selector without a name: %v %v, want all families", got, err)
	}
	any.Expr = "rate("
	if _, err := Families([]rules.Rule{any}); err == nil || !strings.Contains(err.Error(), "gpu_utilization") {
		t.Errorf("a broken expression: %v", err)
	}
}

func TestValidate(t *testing.T) {
	good := Config{Rules: []rules.Rule{rule()}, Interval: 5 * time.Second, ExporterNamespace: "capstan-node", ExporterService: "capstan-exporter",
		Namespace: "capstan-system", Service: "capstan-adapter", Secret: "capstan-adapter-tls", ExporterSecret: "capstan-exporter-tls", ScrapeSecret: "capstan-scrape-tls", APIServices: []string{External}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	f := func(change func(*Config), want string) {
		t.Helper()
		c := good
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	f(func(c *Config) { c.Interval = time.Millisecond }, "interval is 1ms: it must be from 1s to 1m")
	f(func(c *Config) { c.Interval = 15 * time.Second }, "rule gpu_utilization: maxAge 15s is less than two intervals of 15s")
	f(func(c *Config) { c.Interval = 12 * time.Second }, "window 30s is less than three intervals")
	f(func(c *Config) { c.Rules = nil }, "there is no rule")
	f(func(c *Config) { c.Namespace = "" }, "namespace is empty")
	f(func(c *Config) { c.APIServices = nil }, "no APIService")
	f(func(c *Config) { c.APIServices = []string{"v1.custom.metrics.k8s.io"} }, "v1beta2.custom.metrics.k8s.io")
	f(func(c *Config) { c.CertValidity = time.Second }, "at least 1m")
	f(func(c *Config) { c.CAValidity = time.Hour }, "less than three times")
}
