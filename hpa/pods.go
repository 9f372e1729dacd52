package hpa

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// Pod is a pod of the scale target.
type Pod struct {
	Name        string
	Phase       string    // Pending, Running, Succeeded, Failed, Unknown
	Terminating bool      // has a deletion timestamp
	Ready       string    // status of the condition Ready: True, False, Unknown; "" = there is no such condition
	ReadySince  time.Time // the condition's lastTransitionTime
	Started     time.Time // status.startTime; zero = none
}

// ofPods is for the pods' own metrics: the ratio of their mean and the target, times the pods that count. Pods without a value count
// against the direction: as if at the target when it goes down, as if idle when it goes up.
func (p *Proposal) ofPods(c Controller, m Metric, t band, st State, r Reading, now time.Time) error {
	if len(r.Samples) == 0 {
		return errNoItems
	}
	if len(st.Pods) == 0 {
		return errNoPods
	}
	values := map[string]Milli{}
	for name, s := range r.Samples {
		values[name] = s.Value
	}
	p.group(c, m, st.Pods, r.Samples, now)
	for _, name := range p.Ignored {
		delete(values, name)
	}
	for _, name := range p.Unready {
		delete(values, name)
	}
	if len(values) == 0 {
		return errors.New("no pod that counts has a value; they may be starting")
	}
	if m.Target.Type == Utilization {
		for _, pod := range st.Pods {
			if _, ok := r.Requests[pod.Name]; !ok {
				return fmt.Errorf("pod %s requests no %s: set resources.requests of its containers", pod.Name, m.Name)
			}
		}
	}

	var err error
	if p.Usage, p.Percent, p.Ratio, err = m.usage(values, r.Requests); err != nil {
		return err
	}
	growsWithUnready := len(p.Unready) > 0 && p.Ratio > 1
	if !growsWithUnready && len(p.Missing) == 0 {
		if t.holds(p.Ratio) {
			p.Replicas, p.Why = st.SpecReplicas, WithinTolerance
			return nil
		}
		p.Replicas, p.Wraps = toInt32(math.Ceil(p.Ratio * float64(p.Counted)))
		p.Why = OutsideTolerance
		return nil
	}

	for _, name := range p.Missing {
		switch {
		case p.Ratio < 1 && m.Target.Type == Utilization:
			values[name] = r.Requests[name] * Milli(max(100, m.Target.Percent)) / 100
		case p.Ratio < 1:
			values[name] = m.Target.Value
		case p.Ratio > 1:
			values[name] = 0
		}
	}
	if growsWithUnready {
		for _, name := range p.Unready {
			values[name] = 0
		}
	}
	if _, _, p.Assumed, err = m.usage(values, r.Requests); err != nil {
		return err
	}
	if t.holds(p.Assumed) {
		p.Replicas, p.Why = st.SpecReplicas, WithinTolerance
		return nil
	}
	p.Replicas, p.Wraps = toInt32(math.Ceil(p.Assumed * float64(len(values))))
	p.Why = OutsideTolerance
	if p.Ratio < 1 && p.Assumed > 1 || p.Ratio > 1 && p.Assumed < 1 || p.Assumed < 1 && p.Replicas > st.SpecReplicas || p.Assumed > 1 && p.Replicas < st.SpecReplicas {
		p.Replicas, p.Why, p.Wraps = st.SpecReplicas, WouldTurn, false
	}
	return nil
}

// usage is the mean of the values and its ratio to the target; for a Utilization also that of all that is used to all that is requested.
func (m Metric) usage(values, requests map[string]Milli) (mean Milli, percent int32, ratio float64, err error) {
	var used, requested Milli
	n := 0
	for name, v := range values {
		if m.Target.Type == Utilization {
			request, ok := requests[name]
			if !ok {
				continue // a pod that the selector does not match
			}
			requested += request
		}
		used += v
		n++
	}
	if m.Target.Type != Utilization {
		mean = used / Milli(n)
		return mean, 0, float64(mean) / float64(m.Target.Value), nil
	}
	if requested == 0 {
		return 0, 0, 0, errors.New("no pod that the selector matches has a value and a request")
	}
	percent = int32(used * 100 / requested)
	return used / Milli(n), percent, float64(percent) / float64(m.Target.Percent), nil
}

// group sorts the pods by what they are to the metric.
func (p *Proposal) group(c Controller, m Metric, pods []Pod, samples map[string]Sample, now time.Time) {
	cpu := m.Name == "cpu" && (m.Source == Resource || m.Source == ContainerResource)
	for _, pod := range pods {
		sample, found := samples[pod.Name]
		switch {
		case pod.Terminating || pod.Phase == "Failed":
			p.Ignored = append(p.Ignored, pod.Name)
		case pod.Phase == "Pending":
			p.Unready = append(p.Unready, pod.Name)
		case !found:
			p.Missing = append(p.Missing, pod.Name)
		case cpu && pod.starting(c, sample, now):
			p.Unready = append(p.Unready, pod.Name)
		default:
			p.Counted++
		}
	}
	slices.Sort(p.Ignored)
	slices.Sort(p.Unready)
	slices.Sort(p.Missing)
}

// starting says that a pod's CPU tells of its start, not of its load: within the initialization period while it is not Ready or the
// sample began before it was; later if it has never been Ready.
func (p Pod) starting(c Controller, s Sample, now time.Time) bool {
	if p.Ready == "" || p.Started.IsZero() {
		return true
	}
	if p.Started.Add(c.CPUInitialization).After(now) {
		return p.Ready == "False" || s.At.Before(p.ReadySince.Add(s.Window))
	}
	return p.Ready == "False" && p.Started.Add(c.InitialReadinessDelay).After(p.ReadySince)
}
