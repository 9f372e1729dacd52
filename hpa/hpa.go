// Package hpa is the arithmetic of Kubernetes' HorizontalPodAutoscaler: what it makes of its metrics, and why.
//
// [Decide] is one sync of the controller (podautoscaler in k8s.io/kubernetes v1.37, with its default feature gates) as a plain
// function. What the controller keeps in memory is a [History], which goes in and comes out; now is an argument. So a person can be
// told why a workload did not scale, and tests can ask what the HPA would make of a metric. test/hpaconformance drives the real
// controller through random histories and compares every step.
//
// What is not arithmetic is not here: reading metrics, finding the scale target, two HPAs for the same pods, a failed write. Decide
// assumes that the size it decides upon is written.
//
// It differs from the controller in one respect. Where that converts a number to an int32 that it does not fit, the result depends
// on the processor that the controller runs on (kubernetes/kubernetes#126892: an overload scales down to the minimum). Here the
// number is the nearest int32, and the field Wraps tells of it.
package hpa

import (
	"errors"
	"fmt"
	"time"
)

// Controller holds the flags of kube-controller-manager that matter.
type Controller struct {
	Tolerance              float64       // --horizontal-pod-autoscaler-tolerance: a share, 0.1 is 10 %
	DownscaleStabilization time.Duration // --horizontal-pod-autoscaler-downscale-stabilization
	CPUInitialization      time.Duration // --horizontal-pod-autoscaler-cpu-initialization-period
	InitialReadinessDelay  time.Duration // --horizontal-pod-autoscaler-initial-readiness-delay
}

// Defaults are the flags' default values.
var Defaults = Controller{Tolerance: 0.1, DownscaleStabilization: 5 * time.Minute, CPUInitialization: 5 * time.Minute, InitialReadinessDelay: 30 * time.Second}

// State is what the controller finds at a sync.
type State struct {
	SpecReplicas   int32     // the scale's spec.replicas
	StatusReplicas int32     // the scale's status.replicas: pods that exist, in whatever state
	Pods           []Pod     // those that the scale's selector matches; External metrics with an AverageValue do not look at them
	Readings       []Reading // Readings[i] is of Spec.Metrics[i]; a metric without one could not be read
}

// Ground is what a size was decided upon.
type Ground string

const (
	OnMetrics Ground = "metrics"     // the metrics, then window, policies and limits
	OnLimits  Ground = "limits"      // the size was below minReplicas or above maxReplicas: no metric was asked
	OnError   Ground = "error"       // metrics that cannot be read keep the size
	OnZero    Ground = "scaled to 0" // spec.replicas is 0 and the HPA did not do it: it is switched off
)

// Condition is one of the conditions in the HPA's status. The zero value: this sync did not set it, the old one stands.
type Condition struct {
	True   bool
	Reason string // as Kubernetes names it, such as TooManyReplicas
}

// Decision is the new size and how it came about.
type Decision struct {
	Replicas int32  // the new spec.replicas; the old ones mean that nothing is written
	Ground   Ground //

	Metrics       []Proposal    // one for each of Spec.Metrics; nil unless they were asked
	Deciding      int           // index in Metrics of the highest proposal; -1: there is none
	Stabilization Stabilization // of the highest proposal
	Limit         Limit         // of the stabilized one
	Err           error         // why the metrics give no size; a metric's own error is in Metrics

	// AbleToScale is what stood in the HPA's status before a successful write made it SucceededRescale.
	AbleToScale, ScalingActive, ScalingLimited Condition
}

// Decide is one sync of the HPA's controller. s is as the API server has stored it, which is: valid, and with at least one metric.
// h is what the sync before returned, the zero History for a controller that has just started; it is not changed.
//
// The size is always within minReplicas and maxReplicas, except that 0 stays 0 while that switches the HPA off or its metrics cannot be
// read.
func Decide(c Controller, s Spec, st State, h History, now time.Time) (Decision, History) {
	current := st.SpecReplicas
	h = h.begin(current, now)
	d := Decision{Replicas: current, Deciding: -1, AbleToScale: Condition{true, "SucceededGetScale"}}
	switch {
	case current == 0 && !(h.ScaledToZero && (s.MinReplicas != 0 || s.fromZero())):
		d.Ground, d.ScalingActive = OnZero, Condition{false, "ScalingDisabled"}
		return d, h
	case current != 0 && current > s.MaxReplicas:
		d.Ground, d.Replicas = OnLimits, s.MaxReplicas
	case current != 0 && current < s.MinReplicas:
		d.Ground, d.Replicas = OnLimits, s.MinReplicas
	default:
		d.propose(c, s, st, now)
		if d.Err != nil {
			d.Ground = OnError
			return d, h
		}
		d.Ground = OnMetrics
		h = d.normalize(c, s, current, h, now)
	}
	if d.Replicas != current {
		h = h.rescaled(s, current, d.Replicas, now)
	}
	return d, h
}

// propose asks every metric. The highest proposal counts. A metric that cannot be read might have been the highest: then the others
// may only keep the size or make it grow.
func (d *Decision) propose(c Controller, s Spec, st State, now time.Time) {
	var highest int32
	var first error
	invalid := 0
	tolerance := s.tolerance(c)
	for i, m := range s.Metrics {
		reading := Reading{Err: errNotRead}
		if i < len(st.Readings) {
			reading = st.Readings[i]
		}
		p := m.propose(c, tolerance, st, reading, now)
		p.Metric = m.Name
		d.Metrics = append(d.Metrics, p)
		if p.Err != nil {
			if first == nil {
				first = p.Err
				d.ScalingActive = Condition{false, "FailedGet" + string(m.Source) + "Metric"}
			}
			invalid++
			continue
		}
		if d.Deciding < 0 || highest == 0 || p.Replicas > highest { // after a 0 the controller takes any, even a negative one
			highest, d.Deciding = p.Replicas, i
		}
	}
	switch {
	case invalid == len(s.Metrics):
		d.Err = fmt.Errorf("no metric can be read, the size is kept: %w", first)
	case invalid > 0 && highest < st.SpecReplicas:
		d.Err = fmt.Errorf("%d of %d metrics cannot be read and the others ask for fewer workers, the size is kept: %w", invalid, len(s.Metrics), first)
	default:
		d.ScalingActive = Condition{true, "ValidMetricFound"}
		d.Stabilization.Recommended = max(highest, 0)
	}
}

var errNotRead = errors.New("it was not read")

// normalize makes a size of the recommendation: the stabilization window first, then the rate of change and the limits.
func (d *Decision) normalize(c Controller, s Spec, current int32, h History, now time.Time) History {
	recommended := d.Stabilization.Recommended
	if s.Behavior == nil {
		d.Stabilization, h = h.stabilizeDown(recommended, c.DownscaleStabilization, now)
		d.Limit = limitWithoutBehavior(s, current, d.Stabilization.Replicas)
	} else {
		d.Stabilization, h = h.stabilize(s.Behavior.withDefaults(c), current, recommended, now)
		d.Limit = h.limit(s, s.Behavior.withDefaults(c), current, d.Stabilization.Replicas, now)
	}
	d.AbleToScale = Condition{true, "ReadyForNewScale"}
	if d.Stabilization.Reason != "" {
		d.AbleToScale.Reason = d.Stabilization.Reason
	}
	d.ScalingLimited = Condition{d.Limit.Replicas != d.Stabilization.Replicas, d.Limit.Reason}
	d.Replicas = d.Limit.Replicas
	if current == 0 && d.Replicas < s.MinReplicas {
		d.Replicas = s.MinReplicas // it slept at 0, and minReplicas was raised meanwhile
	}
	return h
}
