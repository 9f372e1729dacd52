package hpaconformance

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/hpa"
)

func TestMain(m *testing.M) {
	// Errors of a sync are wanted here. The handlers that print them also wait, by a clock that all bubbles share.
	utilruntime.ErrorHandlers = nil
	os.Exit(m.Run())
}

// Through random histories of specs, sizes, pods and metrics, the package decides as Kubernetes' controller does in every sync: what
// it writes, its conditions and the values in its status.
func TestControllerDecidesAlike(t *testing.T) {
	met := map[string]int{}
	rapid.Check(t, func(rt *rapid.T) {
		s := drawScenario(rt)
		var w *world
		var problem error
		synctest.Test(t, func(t *testing.T) { w, problem = play(t, s) })
		for _, l := range w.looks {
			tally(met, l)
		}
		if problem != nil {
			rt.Fatal(problem)
		}
	})
	delete(met, "")
	for _, what := range slices.Sorted(maps.Keys(met)) {
		t.Logf("%7d %s", met[what], what)
	}
	for _, what := range []string{
		"written", "ground metrics", "ground limits", "ground error", "ground scaled to 0", "from 0", "some metrics invalid",
		"External AverageValue", "External Value", "Object AverageValue", "Object Value", "Pods AverageValue", "Resource AverageValue",
		"Resource Utilization", "ContainerResource AverageValue", "ContainerResource Utilization", "within tolerance", "outside tolerance", "would turn", "from zero", "missing", "unready", "ignored",
		"ScaleUpStabilized", "ScaleDownStabilized", "TooFewReplicas", "TooManyReplicas", "ScaleUpLimit", "ScaleDownLimit", "DesiredWithinRange",
	} {
		if met[what] == 0 {
			t.Errorf("no sync met %q: the histories prove less than they should", what)
		}
	}
}

// A change of the size that no policy looked back at any more may be forgotten for good, even if another manifest looks back further
// again: what random histories hardly come by.
func TestForgottenEventsStayForgotten(t *testing.T) {
	spec := func(back time.Duration) *hpa.Spec {
		return &hpa.Spec{MinReplicas: 1, MaxReplicas: 1000,
			Metrics: []hpa.Metric{{Name: "metric_0", Source: hpa.External, Target: hpa.Target{Type: hpa.AverageValue, Value: 1000}}},
			Behavior: &hpa.Behavior{
				ScaleUp:   hpa.Rules{Policies: []hpa.Policy{{Type: hpa.PodsPolicy, Value: 2, Period: period}, {Type: hpa.PodsPolicy, Value: 20, Period: back}}, SelectPolicy: hpa.MinChange},
				ScaleDown: hpa.Rules{StabilizationWindow: pointer(time.Duration(0))},
			},
		}
	}
	s := scenario{flags: hpa.Defaults}
	at := epoch
	add := func(wait time.Duration, spec *hpa.Spec, load hpa.Milli) {
		s.steps = append(s.steps, step{at: at.Add(time.Duration(len(s.steps)+1) * time.Millisecond), spec: spec, readings: []hpa.Reading{{Items: []hpa.Milli{load}}}})
		at = at.Add(wait)
	}
	add(35*time.Second, spec(45*time.Second), 1_000_000) // grows by 2 at 0, 15 and 30 s
	s.steps[0].size = pointer(int32(4))
	add(0, spec(period), 1000)                // shrinks
	add(60*time.Second, nil, 1000)            //
	add(20*time.Second, nil, 1_000_000)       // all is outdated now, but one place is taken
	add(0, spec(10*time.Minute), 1_000_000)   // the others count again
	add(5*time.Minute, nil, 1_000_000)        // until they are overwritten
	add(5*time.Minute, nil, 1_000_000)        //
	add(time.Minute, spec(15*time.Minute), 1) //
	var problem error
	synctest.Test(t, func(t *testing.T) { _, problem = play(t, s) })
	if problem != nil {
		t.Fatal(problem)
	}
}

// tally notes what a sync was about.
func tally(met map[string]int, l *look) {
	d := l.decision
	met["syncs"]++
	met["ground "+string(d.Ground)]++
	if d.Ground == hpa.OnMetrics {
		met[d.Stabilization.Reason]++
		met[d.Limit.Reason]++
	}
	if l.wrote != nil {
		met["written"]++
	}
	if l.state.SpecReplicas == 0 && d.Ground == hpa.OnMetrics {
		met["from 0"]++
	}
	for i, p := range d.Metrics {
		if p.Err == nil {
			met[string(l.spec.Metrics[i].Source)+" "+string(l.spec.Metrics[i].Target.Type)]++
			met[string(p.Why)]++
		}
		if p.Err != nil && d.Err == nil {
			met["some metrics invalid"]++
		}
		for what, pods := range map[string][]string{"missing": p.Missing, "unready": p.Unready, "ignored": p.Ignored} {
			if len(pods) > 0 {
				met[what]++
			}
		}
	}
}

// compare looks at what the controller has done in the newest syncs. The world was the same in all of them, and the HPA's status is
// that after the last.
func (w *world) compare() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, l := range w.looks {
		written := l.state.SpecReplicas
		if l.wrote != nil {
			written = *l.wrote
		}
		if written != l.decision.Replicas || (l.wrote != nil) != (l.decision.Replicas != l.state.SpecReplicas) {
			return fmt.Errorf("sync %d at %s: the controller goes from %d to %d, the package to %+v\nspec %+v\nstate %+v", i, l.at.Sub(epoch), l.state.SpecReplicas, written, l.decision, l.spec, l.state)
		}
	}
	if len(w.looks) == 0 {
		return nil
	}
	l := w.looks[len(w.looks)-1]
	stored, err := w.client.AutoscalingV2().HorizontalPodAutoscalers(namespace).Get(context.Background(), workload, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if err := sameStatus(stored.Status, l, w.history.ScaledToZero); err != nil {
		return fmt.Errorf("sync %d at %s: %w\nspec %+v\nstate %+v\ndecision %+v", len(w.looks)-1, l.at.Sub(epoch), err, l.spec, l.state, l.decision)
	}
	return nil
}

func sameStatus(status autoscalingv2.HorizontalPodAutoscalerStatus, l *look, scaledToZero bool) error {
	d := l.decision
	able := d.AbleToScale
	if l.wrote != nil {
		able.Reason = "SucceededRescale"
	}
	want := map[autoscalingv2.HorizontalPodAutoscalerConditionType]hpa.Condition{
		autoscalingv2.AbleToScale: able, autoscalingv2.ScalingActive: d.ScalingActive, autoscalingv2.ScalingLimited: d.ScalingLimited,
	}
	for _, c := range status.Conditions {
		got := hpa.Condition{True: c.Status == corev1.ConditionTrue, Reason: c.Reason}
		if c.Type == autoscalingv2.ScaledToZero {
			if got.True != scaledToZero {
				return fmt.Errorf("the condition ScaledToZero is %t, the package says %t", got.True, scaledToZero)
			}
		} else if w := want[c.Type]; w.Reason != "" && w != got {
			return fmt.Errorf("the condition %s is %+v, the package says %+v", c.Type, got, w)
		}
		delete(want, c.Type)
	}
	for kind, c := range want {
		if c.Reason != "" {
			return fmt.Errorf("there is no condition %s, the package says %+v", kind, c)
		}
	}
	if len(status.CurrentMetrics) != len(d.Metrics) {
		return fmt.Errorf("the status has %d metrics, the package %d", len(status.CurrentMetrics), len(d.Metrics))
	}
	for i, m := range l.spec.Metrics[:len(d.Metrics)] {
		if err := sameValue(status.CurrentMetrics[i], m, d.Metrics[i], l.state.StatusReplicas); err != nil {
			return fmt.Errorf("metric %s: %w", m.Name, err)
		}
	}
	return nil
}

func sameValue(status autoscalingv2.MetricStatus, m hpa.Metric, p hpa.Proposal, statusReplicas int32) error {
	var current autoscalingv2.MetricValueStatus
	switch {
	case status.External != nil:
		current = status.External.Current
	case status.Object != nil:
		current = status.Object.Current
	case status.Pods != nil:
		current = status.Pods.Current
	case status.Resource != nil:
		current = status.Resource.Current
	case status.ContainerResource != nil:
		current = status.ContainerResource.Current
	}
	value := func(q *resource.Quantity) hpa.Milli {
		if q == nil {
			return math.MinInt64
		}
		return hpa.Milli(q.MilliValue())
	}
	switch {
	case p.Err != nil:
		if current.Value != nil || current.AverageValue != nil {
			return fmt.Errorf("its status is %+v, the package says: %w", current, p.Err)
		}
	case m.Target.Type == hpa.Value:
		if value(current.Value) != p.Usage {
			return fmt.Errorf("its value is %v, the package says %d", current.Value, p.Usage)
		}
	case m.Source == hpa.External || m.Source == hpa.Object:
		if value(current.AverageValue) != p.Average && statusReplicas > 0 {
			return fmt.Errorf("its average is %v, the package says %d", current.AverageValue, p.Average)
		}
	default:
		if value(current.AverageValue) != p.Usage {
			return fmt.Errorf("its average is %v, the package says %d", current.AverageValue, p.Usage)
		}
		if current.AverageUtilization != nil && *current.AverageUtilization != p.Percent {
			return fmt.Errorf("its utilization is %d, the package says %d", *current.AverageUtilization, p.Percent)
		}
	}
	return nil
}
