package hpa

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Reading is what one metric was found to be.
type Reading struct {
	Items    []Milli           // External: the values of all items. Object: its one value
	Samples  map[string]Sample // Pods and resources: by pod name
	Requests map[string]Milli  // resources with a Utilization: by pod name, what it requests; a pod without one makes the metric an error
	Err      error             // it could not be read; then nothing else counts
}

// Sample is one pod's value. The HPA looks at its time only where it is about CPU.
type Sample struct {
	Value  Milli
	At     time.Time
	Window time.Duration
}

// Proposal is what one metric proposes.
type Proposal struct {
	Metric   string
	Replicas int32
	Why      Why
	Err      error // then there is no proposal

	Usage     Milli   // External and Object: the sum. Pods and resources: the mean of the pods that count
	Percent   int32   // Utilization: the mean, in percent of the requests
	Average   Milli   // what the HPA's status shows as current, for External and Object with AverageValue: Usage over status.replicas, rounded up; 0 for no replicas, where the status has garbage
	Ratio     float64 // of usage and target; for 0 status.replicas +Inf or NaN
	Low, High float64 // the tolerance: a ratio from Low to High keeps the size

	// Of Pods and resources. Counted are the pods whose value counts. The others, sorted: Unready are Pending (for CPU: starting), Missing
	// have no value, Ignored are terminating or Failed.
	Counted                   int
	Unready, Missing, Ignored []string
	// Assumed is the ratio once the pods without a value are thought of as at the target (downwards) or idle (upwards, the unready ones
	// likewise); 0 if nothing had to be assumed.
	Assumed float64

	Wraps bool // Replicas is the nearest int32; the controller's number depends on its processor
}

// Why says what made a proposal.
type Why string

const (
	WithinTolerance  Why = "within tolerance"  // the size is kept. With External and Object AverageValue that is status.replicas, else spec.replicas
	OutsideTolerance Why = "outside tolerance" // usage over target, or the ratio times the pods that count
	WouldTurn        Why = "would turn"        // what is assumed of the pods without a value leads to the other direction: the size is kept
	FromZero         Why = "from zero"         // External and Object with Value at 0 replicas: the ratio itself, without tolerance
)

var (
	errNoItems = errors.New("the metrics API answers with no item")
	errNoPods  = errors.New("the selector of the scale target matches no pod")
)

// propose is what the metric makes of its reading.
func (m Metric) propose(c Controller, t band, st State, r Reading, now time.Time) (p Proposal) {
	p.Low, p.High = t.low, t.high
	err := r.Err
	if err == nil {
		switch {
		case m.Target.Type == Utilization && (m.Source == Resource || m.Source == ContainerResource),
			m.Target.Type == AverageValue && (m.Source == Pods || m.Source == Resource || m.Source == ContainerResource):
			err = p.ofPods(c, m, t, st, r, now)
		case m.Target.Type == AverageValue && (m.Source == External || m.Source == Object):
			err = p.ofSumPerPod(m, t, st, r)
		case m.Target.Type == Value && (m.Source == External || m.Source == Object):
			err = p.ofSum(m, t, st, r)
		default:
			err = fmt.Errorf("target type %q does not go with a metric of type %q", m.Target.Type, m.Source)
		}
	}
	if err != nil {
		p.Replicas, p.Why, p.Err = 0, "", fmt.Errorf("metric %s: %w", m.Name, err)
	}
	return p
}

// ofSumPerPod is for an AverageValue of External or Object: so many pods that each has its share of the sum. Which pods there are, and
// in what state, plays no part. A sum that is negative at any item is taken for an overflow.
func (p *Proposal) ofSumPerPod(m Metric, t band, st State, r Reading) error {
	if len(r.Items) == 0 {
		return errNoItems
	}
	for _, v := range r.Items {
		p.Usage += v
		if p.Usage < 0 && m.Source == External {
			p.Usage = math.MaxInt64
			break
		}
	}
	sum, target := float64(p.Usage), float64(m.Target.Value)
	p.Ratio = sum / (target * float64(st.StatusReplicas))
	switch {
	case sum >= math.MaxInt64:
		p.Average = math.MaxInt64
	case st.StatusReplicas > 0:
		p.Average = Milli(math.Ceil(sum / float64(st.StatusReplicas)))
	}
	if t.holds(p.Ratio) {
		p.Replicas, p.Why = st.StatusReplicas, WithinTolerance
		return nil
	}
	wraps := false
	p.Replicas, wraps = toInt32(math.Ceil(sum / target))
	p.Why, p.Wraps = OutsideTolerance, wraps && m.Source == Object // that of External is capped
	return nil
}

// ofSum is for a Value of External or Object: the pods that are Ready, times the ratio.
func (p *Proposal) ofSum(m Metric, t band, st State, r Reading) error {
	if len(r.Items) == 0 {
		return errNoItems
	}
	for _, v := range r.Items {
		if v > 0 && p.Usage > math.MaxInt64-v {
			p.Usage = math.MaxInt64
			break
		}
		p.Usage += v
	}
	p.Ratio = float64(p.Usage) / float64(m.Target.Value)
	if st.SpecReplicas == 0 {
		p.Why = FromZero
		p.Replicas, p.Wraps = toInt32(math.Ceil(p.Ratio))
		return nil
	}
	if t.holds(p.Ratio) {
		p.Why, p.Replicas = WithinTolerance, st.SpecReplicas
		return nil
	}
	if len(st.Pods) == 0 {
		return errNoPods
	}
	for _, pod := range st.Pods {
		if pod.Phase == "Running" && pod.Ready == "True" {
			p.Counted++
		}
	}
	p.Why = OutsideTolerance
	p.Replicas, p.Wraps = toInt32(math.Ceil(p.Ratio * float64(p.Counted)))
	p.Wraps = p.Wraps && p.Replicas < 0 // upwards it is capped
	return nil
}

// toInt32 is the nearest int32, 0 for NaN. far says that there was none at hand: Go leaves to the processor what a plain conversion gives.
func toInt32(f float64) (n int32, far bool) {
	switch {
	case f > math.MaxInt32:
		return math.MaxInt32, true
	case f < math.MinInt32:
		return math.MinInt32, true
	case f != f:
		return 0, true
	}
	return int32(f), false
}
