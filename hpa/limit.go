package hpa

import (
	"math"
	"time"
)

// Limit is what the rate of change and minReplicas or maxReplicas make of the stabilized size.
type Limit struct {
	Replicas int32
	Reason   string        // as in ScalingLimited: DesiredWithinRange, TooFewReplicas, TooManyReplicas, ScaleUpLimit, ScaleDownLimit
	Rate     int32         // the size to which it might change now, were there no minReplicas and maxReplicas; 0 where the rate plays no part
	Policies []PolicyLimit // each of the behavior's, for the direction in which the size goes
}

// PolicyLimit is what one policy allows.
type PolicyLimit struct {
	Policy         Policy
	Added, Removed int32     // by the HPA within the period until now
	Start          int32     // the size at the start of the period
	Bound          int32     // the size that it allows, upwards at most, downwards at least
	Until          time.Time // when the oldest change that it counts leaves the period; zero = it counts none
	Wraps          bool      // the bound is no int32: for Pods the controller's wraps around, for Percent it depends on the processor
}

const withinRange = "DesiredWithinRange"

// limitWithoutBehavior doubles at most, or goes to 4.
func limitWithoutBehavior(s Spec, current, want int32) Limit {
	rate, _ := toInt32(math.Max(2*float64(current), 4))
	l := Limit{Replicas: want, Reason: withinRange, Rate: rate}
	switch most := min(s.MaxReplicas, rate); {
	case want < s.MinReplicas:
		l.Replicas, l.Reason = s.MinReplicas, "TooFewReplicas"
	case want > most && s.MaxReplicas > rate:
		l.Replicas, l.Reason = most, "ScaleUpLimit"
	case want > most:
		l.Replicas, l.Reason = most, "TooManyReplicas"
	}
	return l
}

// limit applies the behavior's policies.
func (h History) limit(s Spec, b Behavior, current, want int32, now time.Time) Limit {
	l := Limit{Replicas: want, Reason: withinRange}
	switch {
	case want > current:
		l.Policies = h.policies(b.ScaleUp, current, 1, now)
		l.Rate = max(selected(b.ScaleUp, l.Policies, current, 1), current)
		most := min(s.MaxReplicas, l.Rate)
		switch {
		case want <= most:
		case s.MaxReplicas > l.Rate:
			l.Replicas, l.Reason = most, "ScaleUpLimit"
		default:
			l.Replicas, l.Reason = most, "TooManyReplicas"
		}
	case want < current:
		l.Policies = h.policies(b.ScaleDown, current, -1, now)
		l.Rate = min(selected(b.ScaleDown, l.Policies, current, -1), current)
		least := max(s.MinReplicas, l.Rate)
		switch {
		case want >= least:
		case s.MinReplicas < l.Rate:
			l.Replicas, l.Reason = least, "ScaleDownLimit"
		default:
			l.Replicas, l.Reason = least, "TooFewReplicas"
		}
	}
	return l
}

// selected is the bound that counts. The bigger change is the higher bound upwards and the lower one downwards.
func selected(r Rules, limits []PolicyLimit, current int32, direction int32) int32 {
	if r.SelectPolicy == Disabled {
		return current
	}
	bound := limits[0].Bound
	for _, l := range limits[1:] {
		if (r.SelectPolicy == MinChange) == (direction > 0) {
			bound = min(bound, l.Bound)
		} else {
			bound = max(bound, l.Bound)
		}
	}
	return bound
}

// policies says what each allows, with direction 1 for up and -1 for down. Sums wrap around as the controller's do: an HPA whose policy
// allows 2147483647 pods never grows.
func (h History) policies(r Rules, current, direction int32, now time.Time) (limits []PolicyLimit) {
	for _, p := range r.Policies {
		l := PolicyLimit{Policy: p}
		for _, e := range h.Ups {
			l.count(e, &l.Added, now)
		}
		for _, e := range h.Downs {
			l.count(e, &l.Removed, now)
		}
		l.Start = current - l.Added + l.Removed
		switch p.Type {
		case PodsPolicy:
			l.Bound = l.Start + direction*p.Value
			l.Wraps = int64(l.Bound) != int64(l.Start)+int64(direction)*int64(p.Value)
		case PercentPolicy:
			bound := float64(l.Start) * (1 + float64(direction)*float64(p.Value)/100)
			if direction > 0 {
				bound = math.Ceil(bound) // else a small workload would never grow
			}
			l.Bound, l.Wraps = toInt32(bound)
		}
		limits = append(limits, l)
	}
	return limits
}

func (l *PolicyLimit) count(e ScaleEvent, sum *int32, now time.Time) {
	if !e.At.After(now.Add(-l.Policy.Period)) {
		return
	}
	*sum += e.Change
	if leaves := e.At.Add(l.Policy.Period); l.Until.IsZero() || leaves.Before(l.Until) {
		l.Until = leaves
	}
}
