package hpaconformance

import (
	"errors"
	"fmt"
	"time"

	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/hpa"
)

// scenario is all that happens in a world.
type scenario struct {
	flags hpa.Controller
	steps []step
}

// step is a moment at which the world changes.
type step struct {
	at       time.Time
	spec     *hpa.Spec // nil = as it was
	size     *int32    // somebody else writes spec.replicas; nil = nobody does
	lag      int32     // what status.replicas differ from them by
	pods     []hpa.Pod
	readings []hpa.Reading
}

// epoch is when time begins in a bubble of synctest.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// onSync is a moment at which the controller usually syncs: it starts after the 100 ms for which it waits for its caches.
func onSync(now time.Time) time.Time { return now.Truncate(period).Add(100 * time.Millisecond) }

// tolerances are the ones that are drawn, as a manifest writes them.
var tolerances = map[float64]string{0: "0", 0.05: "50m", 0.3: "0.3", 1: "1"}

// drawScenario draws the world's moments so that none is at the same instant as another one or as a sync of the controller.
func drawScenario(t *rapid.T) scenario {
	s := scenario{flags: hpa.Controller{
		Tolerance:              rapid.SampledFrom([]float64{0.1, 0, 0.25}).Draw(t, "tolerance"),
		DownscaleStabilization: time.Duration(rapid.SampledFrom([]int{300, 0, 30, 45, 60}).Draw(t, "downscaleStabilization")) * time.Second,
		CPUInitialization:      time.Duration(rapid.SampledFrom([]int{300, 0, 60}).Draw(t, "cpuInitialization")) * time.Second,
		InitialReadinessDelay:  30 * time.Second,
	}}
	at := epoch
	direct := rapid.IntRange(0, 2).Draw(t, "direct") == 0
	var spec hpa.Spec
	for i := range rapid.IntRange(2, 30).Draw(t, "steps") {
		st := step{lag: rapid.SampledFrom([]int32{0, 0, 0, -1, -3, 2}).Draw(t, "lag")}
		if i == 0 || rapid.IntRange(0, 9).Draw(t, "new spec") == 0 {
			if spec = drawSpec(t, i > 0 && spec.Behavior != nil); direct {
				unbind(&spec)
			}
			st.spec = new(hpa.Spec)
			*st.spec = spec
		}
		if i == 0 || rapid.IntRange(0, 11).Draw(t, "new size") == 0 {
			st.size = pointer(rapid.Int32Range(0, 14).Draw(t, "size"))
		}
		st.at = at.Add(time.Duration(i+1) * time.Millisecond)
		st.pods = drawPods(t, st.at)
		for _, m := range spec.Metrics {
			st.readings = append(st.readings, drawReading(t, m, st.pods, st.at))
		}
		s.steps = append(s.steps, st)
		at = at.Add(time.Duration(rapid.SampledFrom([]int{15, 20, 30, 60, 7, 200}).Draw(t, "seconds")) * time.Second)
	}
	return s
}

func drawSpec(t *rapid.T, keepsBehavior bool) hpa.Spec {
	s := hpa.Spec{MaxReplicas: rapid.SampledFrom([]int32{10, 6, 3, 100, 2147483647}).Draw(t, "maxReplicas")}
	resource := false
	for i := range rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "metrics") {
		m := drawMetric(t, i)
		ofResource := m.Source == hpa.Resource || m.Source == hpa.ContainerResource
		if ofResource && resource {
			continue // one API answers for both, with one list
		}
		resource = resource || ofResource
		s.Metrics = append(s.Metrics, m)
		if m.Source == hpa.External || m.Source == hpa.Object {
			s.MinReplicas = -1
		}
	}
	if s.MinReplicas == -1 {
		s.MinReplicas = rapid.Int32Range(0, 3).Draw(t, "minReplicas")
	} else {
		s.MinReplicas = rapid.Int32Range(1, 3).Draw(t, "minReplicas")
	}
	if keepsBehavior || rapid.IntRange(0, 2).Draw(t, "behavior") > 0 {
		s.Behavior = &hpa.Behavior{ScaleUp: drawRules(t), ScaleDown: drawRules(t)}
	}
	return s
}

// unbind makes what a metric proposes the size at once, so that the size tells of the proposal.
func unbind(s *hpa.Spec) {
	s.Metrics = s.Metrics[:1]
	if f := s.Metrics[0].Source; f != hpa.External && f != hpa.Object {
		s.MinReplicas = max(1, s.MinReplicas)
	}
	s.MaxReplicas = 1000
	s.Behavior = &hpa.Behavior{
		ScaleUp:   hpa.Rules{Policies: []hpa.Policy{{Type: hpa.PodsPolicy, Value: 1000, Period: period}}},
		ScaleDown: hpa.Rules{StabilizationWindow: pointer(time.Duration(0))},
	}
}

func drawMetric(t *rapid.T, i int) hpa.Metric {
	m := hpa.Metric{Name: fmt.Sprintf("metric_%d", i)}
	m.Source = rapid.SampledFrom([]hpa.Source{hpa.External, hpa.External, hpa.Object, hpa.Pods, hpa.Resource, hpa.Resource, hpa.ContainerResource}).Draw(t, "source")
	m.Target.Type = hpa.AverageValue
	m.Target.Value = hpa.Milli(rapid.SampledFrom([]int64{80_000, 80_000, 1, 333, 12_345_678}).Draw(t, "target"))
	switch m.Source {
	case hpa.External, hpa.Object:
		m.Target.Type = rapid.SampledFrom([]hpa.TargetType{hpa.AverageValue, hpa.Value}).Draw(t, "target type")
	case hpa.Resource, hpa.ContainerResource:
		m.Name = rapid.SampledFrom([]string{"cpu", "memory"}).Draw(t, "resource")
		if rapid.Bool().Draw(t, "utilization") {
			m.Target = hpa.Target{Type: hpa.Utilization, Percent: rapid.SampledFrom([]int32{80, 50, 150}).Draw(t, "percent")}
		}
	}
	return m
}

func drawRules(t *rapid.T) (r hpa.Rules) {
	if w := rapid.SampledFrom([]int{-1, 0, 15, 30, 45, 120}).Draw(t, "window"); w >= 0 {
		r.StabilizationWindow = pointer(time.Duration(w) * time.Second)
	}
	r.SelectPolicy = rapid.SampledFrom([]hpa.SelectPolicy{"", hpa.MaxChange, hpa.MinChange, hpa.MinChange, hpa.Disabled}).Draw(t, "selectPolicy")
	for range rapid.IntRange(0, 3).Draw(t, "policies") {
		p := hpa.Policy{
			Type:   rapid.SampledFrom([]hpa.PolicyType{hpa.PodsPolicy, hpa.PercentPolicy}).Draw(t, "policy type"),
			Value:  rapid.SampledFrom([]int32{1, 2, 4, 10, 50, 100}).Draw(t, "policy value"),
			Period: time.Duration(rapid.SampledFrom([]int{15, 30, 60, 300}).Draw(t, "policy period")) * time.Second,
		}
		if p.Type == hpa.PodsPolicy && rapid.IntRange(0, 19).Draw(t, "no limit") == 0 {
			p.Value = 2147483647
		}
		r.Policies = append(r.Policies, p)
	}
	if v := rapid.SampledFrom([]float64{-1, -1, 0, 0.05, 0.3, 1}).Draw(t, "tolerance"); v >= 0 {
		r.Tolerance = &v
	}
	return r
}

func drawPods(t *rapid.T, now time.Time) (pods []hpa.Pod) {
	odd := rapid.Bool().Draw(t, "odd pods")
	ago := func(what string) time.Time {
		return onSync(now).Add(-time.Duration(rapid.SampledFrom([]int{3600, 0, 15, 45, 60, 285, 300}).Draw(t, what)) * time.Second)
	}
	for i := range rapid.IntRange(0, 8).Draw(t, "pods") {
		p := hpa.Pod{Name: fmt.Sprintf("%s-%d", workload, i), Phase: "Running", Ready: "True", Started: epoch.Add(-time.Hour), ReadySince: epoch.Add(-time.Hour)}
		if odd {
			p.Phase = rapid.SampledFrom([]string{"Running", "Running", "Running", "Pending", "Failed", "Succeeded", "Unknown"}).Draw(t, "phase")
			p.Ready = rapid.SampledFrom([]string{"True", "True", "False", "Unknown", ""}).Draw(t, "ready")
			p.Terminating = rapid.IntRange(0, 7).Draw(t, "terminating") == 0
			p.ReadySince = ago("ready since")
			if p.Started = ago("started"); rapid.IntRange(0, 9).Draw(t, "not started") == 0 {
				p.Started = time.Time{}
			}
		}
		pods = append(pods, p)
	}
	return pods
}

// drawReading draws a metric's value around its target, so that both sides of every limit are met.
func drawReading(t *rapid.T, m hpa.Metric, pods []hpa.Pod, now time.Time) (r hpa.Reading) {
	if rapid.IntRange(0, 11).Draw(t, "fails") == 0 {
		return hpa.Reading{Err: errors.New("the metrics API is away")}
	}
	target := m.Target.Value
	if m.Target.Type == hpa.Utilization {
		target = 1000 // of as much, see the requests
	}
	load := rapid.SampledFrom([]float64{1, 0, 0.3, 0.6, 0.89, 0.9, 0.95, 1.05, 1.1, 1.11, 1.5, 2, 5}).Draw(t, "load")
	value := func() hpa.Milli {
		v := load * float64(target)
		switch rapid.IntRange(0, 19).Draw(t, "odd") {
		case 0:
			v *= 3
		case 1:
			v = -v
		case 2:
			v = v*1000 + 1
		}
		return hpa.Milli(v)
	}
	switch m.Source {
	case hpa.External:
		for range rapid.IntRange(0, 8).Draw(t, "items") {
			r.Items = append(r.Items, value())
		}
	case hpa.Object:
		r.Items = []hpa.Milli{value() * hpa.Milli(rapid.IntRange(1, 8).Draw(t, "times"))}
	default:
		r.Samples, r.Requests = map[string]hpa.Sample{}, map[string]hpa.Milli{}
		whole := rapid.Bool().Draw(t, "whole")
		for _, p := range pods {
			if whole || rapid.IntRange(0, 3).Draw(t, "missing") > 0 {
				at := onSync(now).Add(-time.Duration(rapid.IntRange(0, 6).Draw(t, "age")) * period)
				r.Samples[p.Name] = hpa.Sample{Value: value(), At: at, Window: 30 * time.Second}
			}
			if whole || rapid.IntRange(0, 30).Draw(t, "no request") > 0 {
				r.Requests[p.Name] = hpa.Milli(rapid.SampledFrom([]int64{1000, 1250, 2000, 700}).Draw(t, "request"))
			}
		}
		if rapid.IntRange(0, 15).Draw(t, "stranger") == 0 {
			r.Samples["stranger"] = hpa.Sample{Value: value(), At: onSync(now), Window: 30 * time.Second}
		}
	}
	if m.Source != hpa.Resource && m.Source != hpa.ContainerResource {
		r.Requests = nil
	}
	return r
}
